"""`meshwright groups` and `meshwright schedule` print as tables, JSON and SVG."""

import json

from typer.testing import CliRunner

from runtime.cli import app
from tests.tools.paths import ROOT


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_groups_as_json_has_dense_and_expert_tokens():
    result = run("groups", "--world-size", 16, "--tp", 4, "--pp", 2, "--etp", 1, "--ep", 4, "--format", "json")
    groups = json.loads(result.stdout)
    assert groups["dense"]["dp"][:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups["expert"]["ep"][:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_etp_left_out_is_tp_in_groups():
    layout = ("groups", "--world-size", 16, "--tp", 4, "--pp", 2, "--format", "json")
    assert run(*layout).stdout == run(*layout, "--etp", 4).stdout
    assert json.loads(run(*layout).stdout)["expert"]["tp"][0] == [0, 1, 2, 3]


def test_groups_as_table_lists_every_rank_of_a_group():
    result = run("groups", "--world-size", 16, "--tp", 4, "--pp", 2)
    assert result.exit_code == 0
    assert "[0,8]  [1,9]  [2,10]" in result.stdout


def test_schedule_as_json_equals_the_oracle():
    cases = json.loads((ROOT / "tests" / "oracles" / "schedules.json").read_text())["cases"]
    case = next(c for c in cases if c["pp"] == 4 and c["vpp"] is None and c["num_microbatches"] == 12)
    arguments = ["--pp", 4, "--microbatches", case["num_microbatches"], "--format", "json"]
    result = json.loads(run("schedule", *arguments).stdout)
    rank = result["ranks"][case["pp_rank"]]
    assert result["schedule_table"] == case["schedule_table"]
    assert rank["num_warmup"] == case["num_warmup_microbatches"]
    assert rank["order"] == case["order"]
    assert rank["steps"] == case["steps"]


def test_schedule_as_table_is_a_step_by_rank_grid():
    lines = run("schedule", "--pp", 2, "--microbatches", 2).stdout.splitlines()
    assert lines[3].split() == ["step", "rank0", "rank1"]
    assert lines[4].split() == ["0", "F0.0", "."]
    assert lines[5].split() == ["1", "F1.0", "F0.0"]


def test_schedule_as_svg_has_a_bar_for_each_action():
    text = run("schedule", "--pp", 2, "--microbatches", 4, "--format", "svg").stdout
    assert text.startswith("<svg")
    assert text.count("<rect") == 2 * 2 * 4
