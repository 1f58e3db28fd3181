"""Figures of benchmarks: runs that are predicted, categories of ops, and pictures of traces."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import category_worker as worker
from benchmarks.category_worker import ATTENTION, EXCHANGE, OPTIMIZER, OTHER, PRODUCTS, PYTHON, STEP, UPDATE, WAIT
from benchmarks.draw_trace import draw, rows_of
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


CASES = (
    ("aten::mm", [], PRODUCTS),
    ("aten::addmm_", [], PRODUCTS),
    ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", [], ATTENTION),
    ("aten::gelu", [], OTHER),
    ("aten::copy_", ["aten::to"], OTHER),
    ("c10d::allreduce_", ["_GBackward"], EXCHANGE),
    (WAIT, [], EXCHANGE),
    ("aten::mul_", [UPDATE], OPTIMIZER),
    ("aten::addcdiv_", ["Optimizer.step#AdamW.step"], OPTIMIZER),
    ("c10d::allreduce_", [UPDATE], EXCHANGE),
    (WAIT, [UPDATE], EXCHANGE),
    ("autograd::engine::evaluate_function: MmBackward0", [], PYTHON),
    (STEP, [], PYTHON),
)


@pytest.mark.parametrize(("name", "around", "expected"), CASES)
def test_an_op_is_of_one_category(name: str, around: list[str], expected: str):
    assert worker.category(name, [name, *around, STEP]) == expected


def test_a_step_has_time_in_what_it_does_and_none_in_what_it_does_not():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(i: int) -> None:
        torch.tanh(model(torch.ones(8, 64))).sum().backward()
        optimizer.step()

    found = worker.wall_by_category(step, 2)
    assert set(found) == set(worker.CATEGORIES)
    assert all(found[name] > 0 for name in (PRODUCTS, OTHER, OPTIMIZER, PYTHON))
    assert found[EXCHANGE] == found[ATTENTION] == 0


TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
        *({"ph": "M", "name": "thread_name", "pid": 0, "tid": t, "args": {"name": n}} for t, n in ((1, "a"), (2, "b"))),
        *(
            {"ph": "X", "name": name, "cat": cat, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}
            for name, cat, tid, ts, dur, args in (
                ("step 3", "step", 1, 0.0, 90.0, {"step": 3}),
                ("begin", "phase", 1, 0.0, 10.0, {"step": 3}),
                ("F0.0", "forward", 1, 10.0, 30.0, {"step": 3, "microbatch": 0, "chunk": 0, "stage": 0}),
                ("wait", "wait", 1, 12.0, 5.0, {}),
                ("update", "phase", 1, 40.0, 50.0, {"step": 3}),
                ("step 4", "step", 1, 100.0, 90.0, {"step": 4}),
                ("F0.0", "forward", 1, 110.0, 30.0, {"step": 4, "microbatch": 0, "chunk": 0, "stage": 0}),
                ("wait", "wait", 1, 112.0, 5.0, {}),
                ("F0.0", "forward", 2, 10.0, 30.0, {"step": 3, "microbatch": 0, "chunk": 0, "stage": 0}),
                ("F0.0", "forward", 2, 110.0, 30.0, {"step": 4, "microbatch": 0, "chunk": 0, "stage": 0}),
            )
        ),
    ]
}


def test_a_picture_shows_actions_waits_and_the_update_of_one_step():
    shown = {name: [(e["name"], e["ts"]) for e in events] for name, events in rows_of(TRACE, 3)}
    assert shown == {"rank 0 a": [("F0.0", 10.0), ("update", 40.0), ("wait", 12.0)], "rank 0 b": [("F0.0", 10.0)]}
    last = {name: [(e["name"], e["ts"]) for e in events] for name, events in rows_of(TRACE, None)}
    assert last["rank 0 a"] == [("F0.0", 110.0), ("wait", 112.0)]
    with pytest.raises(SystemExit, match=r"no step 7, but \[3, 4\]"):
        rows_of(TRACE, 7)


def test_a_picture_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    draw(TRACE, tmp_path / "trace.svg")
    assert "rank 0 b" in (tmp_path / "trace.svg").read_text()
