"""benchmarks/predicted.py: the figures of a run are those of its plan; a sweep by hand; the stored runs can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.predicted import PUBLISHED, Predicted, Predictor, cluster_of, read_runs, sweep_row
from passes.errors import PlanError
from planner import plan
from planner.capture.model.reference import load_model

GPT = "hf:examples/gpt2_small.json"
IDS = {"shape": [64], "dtype": "int64", "high": 257}
SPEC = {"inputs": {"input_ids": IDS, "labels": {"like": "input_ids"}}, "batch": {"global": 8, "micro": 2}}
DEFAULTS = {"model": GPT, "cluster": "dgx-a100", "spec": SPEC, "measured": {}}


def run(name: str, mesh: dict[str, int], seconds: float | None = None, **keys: Any) -> dict[str, Any]:
    measured = keys.pop("measured", {} if seconds is None else {"seconds": seconds})
    return {"name": name, "spec": {"mesh": mesh, **keys}, "measured": measured}


def saved(directory: Path, runs: list[Any]) -> Path:
    path = directory / "runs.json"
    path.write_text(json.dumps({"defaults": DEFAULTS, "runs": runs}))
    return path


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> list[Predicted]:
    rows = [
        run("one", {}, 0.01),
        run("tp", {"tp": 2, "dp": 2}, 0.02),
        run("pp", {"pp": 2, "dp": 2}, recompute="full", measured={"fits": False}),
        run("vpp", {"pp": 2, "vpp": 2}, 0.03, pipeline={"schedule": "interleaved_1f1b"}),
        run("ends", {"pp": 6}, pipeline={"split": {"embedding": True, "loss": True}}),  # of 4 blocks
    ]
    predictor = Predictor()
    found = [predictor.of(r) for r in read_runs(saved(tmp_path_factory.mktemp("runs"), rows))]
    assert len(predictor.captured) == 1  # however they are sharded
    return found


@pytest.mark.thorough
def test_a_prediction_is_that_of_the_plan(predicted: list[Predicted]) -> None:
    for found in predicted:
        made = plan(load_model(GPT), found.run.spec.to_dict() | {"cluster": "dgx-a100"})
        assert made.cost is not None
        assert found.candidate.seconds == pytest.approx(made.cost.step_seconds, rel=0.01)
        assert found.candidate.fullest.total == pytest.approx(max(row.total for row in made.memory), rel=0.03)


@pytest.mark.thorough
def test_a_sweep_by_hand(predicted: list[Predicted]) -> None:
    row = sweep_row("all", predicted)
    fastest = min((p for p in predicted if p.run.seconds), key=lambda p: p.candidate.seconds)
    assert row[:3] == ("all", "5", "3")
    assert row[7] == fastest.run.name
    assert row[9] == "3 of 4"  # "pp" did not run, and is predicted to fit


def test_a_layout_that_the_model_does_not_admit_is_an_error(tmp_path: Path) -> None:
    (bad,) = read_runs(saved(tmp_path, [run("heads", {"tp": 64}, 1.0)]))
    with pytest.raises(PlanError):
        Predictor().of(bad)


def test_clusters_of_a_run_differ_by_what_it_writes() -> None:
    plain = cluster_of("dgx-a100")
    other = cluster_of({"base": "dgx-a100", "overlap": 0.0, "links": {"InfiniBand": {"bandwidth": 12.5e9}}})
    assert (other.overlap, other.links[1].bandwidth) == (0.0, 12.5e9)
    assert other.model_copy(update={"overlap": plain.overlap, "links": (other.links[0], plain.links[1])}) == plain


def test_the_stored_runs_can_be_read() -> None:
    assert len(read_runs(PUBLISHED)) == 8
    assert len(read_runs(PUBLISHED.with_name("published_experts.json"))) == 5
