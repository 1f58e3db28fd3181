"""`meshwright diff`: two saved plans, or two specs of one model; bad input is one message and exit code 2."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.report.differences import NOTHING
from runtime.cli import app
from tests.models.tiny import planned
from tests.tools.paths import ROOT

GPT, GPT_SPEC = f"{ROOT / 'examples' / 'gpt.py'}:build", ROOT / "examples" / "gpt.yaml"


def run(*arguments):
    return CliRunner().invoke(app, ["diff", *(str(argument) for argument in arguments)])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("plans")
    paths = folder / "one.json", folder / "two.json"
    planned(tp=2, pp=2).save(paths[0])
    paths[1].write_text(json.dumps(planned(tp=2, dp=2).to_dict(), indent=2))  # as `plan --format json` writes it
    return paths


@pytest.mark.thorough
def test_two_saved_plans_print_what_changed(saved: tuple[Path, Path]):
    result = run(*saved)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "mesh 1 pp 2 1" in lines
    assert "mesh 1 dp 1 2" in lines
    titles = {line for line in lines if line and " " not in line}
    assert {"Mesh", "Parameters", "Collectives", "Stages", "Schedule", "Optimizer"} <= titles


def test_json_has_every_change_with_its_values(saved: tuple[Path, Path]):
    values = json.loads(run(*saved, "--format", "json").stdout)
    assert (values["before"], values["after"]) == tuple(map(str, saved))
    assert values["different"]
    assert not values["same_decisions"]
    (pp,) = [c for c in values["changes"] if (c["table"], c["field"]) == ("mesh", "pp")]
    assert (pp["before"], pp["after"]) == (2, 1)


def test_the_exit_code_tells_only_where_it_is_asked_to(saved: tuple[Path, Path]):
    assert run(*saved).exit_code == 0
    assert run(*saved, "--exit-code").exit_code == 1
    same = run(saved[0], saved[0], "--exit-code")
    assert (same.exit_code, same.stdout) == (0, f"{NOTHING}\n")


@pytest.mark.thorough
def test_two_specs_of_a_model_are_planned(tmp_path: Path):
    other = tmp_path / "other.yaml"
    other.write_text(GPT_SPEC.read_text().replace("micro: 4", "micro: 2"))
    result = run(GPT_SPEC, other, "--model", GPT)
    assert result.exit_code == 0, result.output
    assert "batch.micro" in result.stdout
    assert "num_microbatches" in result.stdout


def test_bad_input_is_one_message_and_exit_code_2(saved: tuple[Path, Path], tmp_path: Path):
    newer, torn, text = (tmp_path / name for name in ("newer.json", "torn.json", "text.txt"))
    newer.write_text(json.dumps(json.loads(saved[0].read_text()) | {"version": 2}))
    torn.write_text(saved[0].read_text()[:1000])
    text.write_text("no plan")
    cases = [
        ((saved[0], GPT_SPEC), ["gpt.yaml is not", "one.json is a saved plan", "fix: give two saved plans"]),
        ((GPT_SPEC, saved[0], "--model", GPT), ["gpt.yaml is not", "fix:"]),
        ((GPT_SPEC, GPT_SPEC), ["are not saved plans", "fix: add --model MODEL"]),
        ((*saved, "--model", GPT), ["these are two saved plans", "--model", "fix:"]),
        ((saved[0], newer), ["the plan has version 2, this program reads version 1", "newer.json"]),
        ((saved[0], torn), ["the plan is damaged or truncated", "torn.json", "fix: save the plan again"]),
        ((text, text), ["are not saved plans", "fix:"]),
        ((text, text, "--model", GPT), ["SpecError"]),
        ((saved[0], tmp_path / "none.json"), ["there is no plan or spec file", "none.json"]),
        ((saved[0], "/dev/full"), ["is a device, not a regular file"]),
        ((GPT_SPEC, GPT_SPEC, "--model", "no_such.py:build"), ["no file no_such.py"]),
    ]
    for arguments, words in cases:
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        for word in words:
            assert word in result.stderr, arguments
