"""Predictions of runs: those of a plan, errors by row, and summaries by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from passes.errors import PlanError
from planner import plan
from planner.capture.model.reference import load_model
from planner.predict.predict import Predicted, Predictor
from planner.predict.runs import Run, Unread, read_runs
from planner.predict.summary import summaries
from runtime.cli import app
from runtime.commands.predict import built

GPT = "hf:examples/gpt2_small.json"
IDS = {"shape": [64], "dtype": "int64", "high": 257}
SPEC = {"inputs": {"input_ids": IDS, "labels": {"like": "input_ids"}}, "batch": {"global": 8, "micro": 2}}
DEFAULTS = {"model": GPT, "cluster": "dgx-a100", "spec": SPEC}
ALONE = {**DEFAULTS, "spec": {**SPEC, "mesh": {}}}


def saved(directory: Path, runs: list[Any], defaults: dict[str, Any] | None = None, **more: Any) -> Path:
    path = directory / "runs.json"
    path.write_text(json.dumps({"defaults": DEFAULTS if defaults is None else defaults, "runs": runs, **more}))
    return path


def run(name: str, mesh: dict[str, int], seconds: float | None = None, **keys: Any) -> dict[str, Any]:
    measured = keys.pop("measured", {} if seconds is None else {"seconds": seconds})
    return {"name": name, "spec": {"mesh": mesh, **keys}, "measured": measured}


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Predicted | Unread]:
    rows = [
        run("one", {}, 0.01),
        run("tp", {"tp": 2, "dp": 2}, 0.02),
        run("pp", {"pp": 2, "dp": 2}, recompute="full", measured={"fits": False}),
        run("vpp", {"pp": 2, "vpp": 2}, 0.03, pipeline={"schedule": "interleaved_1f1b"}),
        run("ends", {"pp": 6}, pipeline={"split": {"embedding": True, "loss": True}}),  # of 4 blocks
        run("three", {"dp": 3}, 1.0),
        run("heads", {"tp": 64}, 1.0),
        run("many", {"dp": 4096}, 1.0, batch={"global": 1 << 14}),
    ]
    predictor = Predictor(built)
    runs = read_runs(saved(tmp_path_factory.mktemp("runs"), rows))
    found = {r.name: predictor.of(r) for r in runs}
    assert len(predictor._captured) == 1  # however they are sharded
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["one", "tp", "pp", "vpp", "ends"])
def test_a_prediction_is_that_of_the_plan(predicted: dict[str, Predicted | Unread], name: str) -> None:
    found = predicted[name]
    assert isinstance(found, Predicted)
    made = plan(load_model(GPT), found.run.spec.to_dict() | {"cluster": "dgx-a100"})
    assert made.cost is not None
    assert found.candidate.seconds == pytest.approx(made.cost.step_seconds, rel=0.01)
    assert found.candidate.fullest.total == pytest.approx(max(row.total for row in made.memory), rel=0.03)


def test_rows_with_errors_are_named(predicted: dict[str, Predicted | Unread]) -> None:
    words = {
        "three": "batch.global = 8 is not divisible",
        "heads": "tp",
        "many": "its mesh has 4096 devices, the cluster 3072",
    }
    for name, word in words.items():
        found = predicted[name]
        assert isinstance(found, Unread)
        assert word in found.why


def test_a_summary_by_hand(predicted: dict[str, Predicted | Unread]) -> None:
    rows = [row for row in predicted.values() if isinstance(row, Predicted)]
    (summary,) = summaries(rows)
    timed = [row for row in rows if row.run.measured.seconds]
    errors = sorted(abs(row.candidate.seconds / (row.run.measured.seconds or 1) - 1) for row in timed)
    assert (summary.runs, summary.timed, summary.judged) == (5, 3, 4)
    assert summary.error == errors[1]
    fastest = min(timed, key=lambda row: row.candidate.seconds)
    assert summary.chosen == fastest.run.name
    assert summary.behind == pytest.approx((fastest.run.measured.seconds or 0) / 0.01 - 1)
    assert summary.fits_right == 3  # "pp" did not run, and is predicted to fit


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no spec": ({"model": GPT, "cluster": "dgx-a100"}, "it has no spec"),
    "no model": ({"cluster": "dgx-a100", "spec": SPEC}, "it has no model"),
    "unknown device": ({**ALONE, "cluster": "dgx-a1000"}, "did you mean dgx-a100"),
    "unknown link": (
        {**ALONE, "cluster": {"base": "dgx-a100", "links": {"Rail": {}}}},
        "the links are NVSwitch",
    ),
    "a measured word": ({**DEFAULTS, "measured": {"seconds": "fast"}}, "seconds"),
    "negative seconds": ({**DEFAULTS, "measured": {"seconds": -1.0}}, "seconds"),
    "auto": ({**DEFAULTS, "spec": {**SPEC, "mesh": "auto"}}, "write the layout that was measured"),
    "unknown key": ({**DEFAULTS, "speed": 3}, "unknown key speed"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_run_that_cannot_be_read_says_why(case: str, tmp_path: Path) -> None:
    defaults, words = BAD[case]
    good = {**DEFAULTS, "name": "good", "spec": {**SPEC, "mesh": {}}, "measured": {"seconds": 1.0}}
    path = saved(tmp_path, [{**defaults, "name": "bad"}, good], {})
    bad, other = read_runs(path)
    assert isinstance(bad, Unread)
    assert isinstance(other, Run)
    assert bad.name == "bad"
    assert words in bad.why


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "no list of runs"),
        ('{"runs": []}', "no list of runs"),
        ('{"runs": [{}], "default": {}}', "unknown key default"),
        ('{"runs": [{}], "defaults": 3}', "defaults is not a mapping"),
        ("{", "invalid YAML"),
    ],
)
def test_a_file_without_runs_is_one_error(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=words):
        read_runs(path)


def test_clusters_of_a_run_differ_by_what_it_writes(tmp_path: Path) -> None:
    other = {"base": "dgx-a100", "overlap": 0.0, "links": {"InfiniBand": {"bandwidth": 12.5e9}}}
    first, second = read_runs(saved(tmp_path, [run("one", {}), {**run("two", {}), "cluster": other}]))
    assert isinstance(first, Run)
    assert isinstance(second, Run)
    assert (second.cluster.overlap, second.cluster.links[1].bandwidth) == (0.0, 12.5e9)
    changed = {"overlap": 1.0, "links": (second.cluster.links[0], first.cluster.links[1])}
    assert second.cluster.model_copy(update=changed) == first.cluster


@pytest.mark.thorough
def test_the_command_names_bad_rows_and_predicts_the_others(tmp_path: Path) -> None:
    small = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_head": 2, "n_layer": 2}
    rows = [{**run("good", {"tp": 2}, 1.0), "model": small}, run("bad", {"tp": 2}, measured={"second": 1})]
    path, out = saved(tmp_path, rows), tmp_path / "table.txt"
    done = CliRunner().invoke(app, ["predict", str(path), "-o", str(out)])
    assert done.exit_code == 0, done.output
    table = out.read_text()
    for words in ("Predicted beside measured", "Runs without a prediction", "second"):
        assert words in table
    as_json = CliRunner().invoke(app, ["predict", str(path), "--format", "json"])
    values = json.loads(as_json.stdout)
    assert [row["name"] for row in values["runs"]] == ["good", "bad"]
    assert values["runs"][0]["step_seconds_range"][0] < values["runs"][0]["step_seconds"]
    assert values["sweeps"][0]["timed"] == 1


def test_the_command_fails_if_no_run_can_be_predicted(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["predict", str(saved(tmp_path, [run("bad", {"tp": 64}, 1.0)]))])
    assert done.exit_code == 2
    assert "none of the 1 runs" in done.output
    assert "Traceback" not in done.output
