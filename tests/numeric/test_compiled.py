"""`compile: true`: losses, gradients and updates are those without it, on every layout, and the plan is what runs.

Each case compiles functions of its own shapes, which takes a while where Inductor's cache on disk has none of them: a
few cases stand for the rest, and `slow` are those that start several processes.
"""

from typing import Any

import pytest
from torch import Tensor

from planner import Plan
from runtime import Engine
from tests.tools.laboratory import NUM_BATCHES, Case, Lab
from tests.tools.limits import HANG_SECONDS

COMPILE = {"compile": True}
SEQUENCE = {"tensor_parallel": {"vocabulary_multiple": 8, "sequence_parallel": True}}
LAYOUTS = {
    "one": ({}, {}),
    "tp2": ({"tp": 2}, {}),
    "pp2": ({"pp": 2}, {}),
    "dp2": ({"dp": 2}, {}),
    "tp2-pp2-sp": ({"tp": 2, "pp": 2}, SEQUENCE),
}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"), [("gpt", "tp2-pp2-sp"), ("llama", "tp2"), ("bert", "one"), ("gpt2", "dp2")]
)
def test_a_compiled_layout_equals_one_process(lab: Lab, model: str, layout: str) -> None:
    mesh, rest = LAYOUTS[layout]
    assert lab.check(Case(model, mesh, COMPILE | rest)).wrong == []


def trained(plan: Plan, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Figures of each step, gradients of the first, and how often pieces ran."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        figures = [engine.forward_backward(batches[0])]
        gradients = engine.gather_gradients()
        reports = [engine.optimizer_step(), *(engine.train_step(batch) for batch in batches[1:])]
        figures += [r.grad_norm for r in reports] + [r.loss for r in reports[1:]]
        evaluated = engine.evaluate(batches[0])
        counts = None if engine.compiled is None else dict(engine.compiled.counts)
        told = None if engine.compiled is None else str(engine.compiled.report)
    own = [piece.index for piece in plan.pieces if plan.mesh.pp_rank_of(piece.stage) == engine.mesh.pp_rank]
    return {"figures": figures, "gradients": gradients, "counts": counts, "own": own, "told": told, "also": evaluated}


@pytest.mark.thorough
def test_a_compiled_step_in_float32_is_within_its_tolerance_and_runs_every_piece_of_the_plan(lab: Lab) -> None:
    rest = {"precision": {"parameters": "float32"}}
    (eager,) = lab.run(Case("gpt", {}, rest, job=trained))
    (found,) = lab.run(Case("gpt", {}, COMPILE | rest, job=trained))
    assert found["figures"] == pytest.approx(eager["figures"], rel=1e-5)
    for name, expected in eager["gradients"].items():
        assert (found["gradients"][name] - expected).norm() <= 1e-5 * expected.norm() + 1e-9, name
    num_microbatches = 4
    runs = {(piece, "compiled"): NUM_BATCHES * num_microbatches for piece in found["own"]}
    runs |= {(piece, "eager"): num_microbatches for piece in found["own"]}  # the evaluation
    assert found["own"]
    assert found["counts"] == runs
    assert "runs op by op" not in found["told"]
    assert eager["counts"] is None


@pytest.mark.thorough
@pytest.mark.slow
def test_ranks_of_a_pipeline_run_their_own_pieces(lab: Lab) -> None:
    found = lab.run(Case("gpt", {"pp": 2}, COMPILE, job=trained))
    assert all(rank["own"] and {piece for piece, _ in rank["counts"]} == set(rank["own"]) for rank in found)
    assert not set(found[0]["own"]) & set(found[1]["own"])


@pytest.mark.thorough
def test_dropout_draws_what_it_draws_without(lab: Lab) -> None:
    (eager,) = lab.run(Case("gpt-dropout", {}, {"train": True}, job=trained))
    (found,) = lab.run(Case("gpt-dropout", {}, COMPILE | {"train": True}, job=trained))
    assert found["figures"] == pytest.approx(eager["figures"], rel=1e-10)
    assert found["counts"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_blocks_that_are_computed_again_are_compiled(lab: Lab, kind: str) -> None:
    case = Case("llama", {}, COMPILE | {"recompute": kind})
    assert any(not row.reason for row in lab.plan(case).compiled)
    assert lab.check(case).wrong == []


def graphs(*scope: str) -> dict[str, Any]:
    return {"cuda_graphs": {"impl": "emulate", "scope": list(scope), "warmup_steps": 1}}


ZERO_BUBBLE = {"pipeline": {"schedule": "zero_bubble"}}
INSIDE = {
    "tp2, full": ("gpt", {"tp": 2}, {"recompute": "full"}),
    "tp2, selective, whole blocks": ("llama", {"tp": 2}, {"recompute": "selective"} | graphs()),
    "tp2, mlp": ("gpt", {"tp": 2}, graphs("mlp")),
    "zero bubble, full": ("gpt", {"pp": 2}, ZERO_BUBBLE | {"recompute": "full"}),
    "zero bubble, attn, selective": ("llama", {"pp": 2}, ZERO_BUBBLE | {"recompute": "selective"} | graphs("attn")),
}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", INSIDE)
def test_pieces_of_recomputed_blocks_and_captured_regions_train_as_without(lab: Lab, name: str) -> None:
    model, mesh, rest = INSIDE[name]
    near = 1e-6 if model == "llama" else 1e-10  # its loss is in float32
    eager = lab.run(Case(model, mesh, rest, job=trained))
    found = lab.run(Case(model, mesh, COMPILE | rest, job=trained))
    for rank, expected in zip(found, eager, strict=True):
        assert rank["figures"] == pytest.approx(expected["figures"], rel=near)
        for parameter, gradient in expected["gradients"].items():
            assert (rank["gradients"][parameter] - gradient).norm() <= near * gradient.norm() + 1e-9, parameter
        assert "runs op by op" not in rank["told"]
    assert any(rank["own"] for rank in found)


@pytest.mark.thorough
def test_an_emulated_graph_of_an_iteration_has_the_ops_of_pieces(lab: Lab) -> None:
    """What is compiled would run at its capture alone."""
    (eager,) = lab.run(Case("gpt", {}, {}, job=trained))
    (found,) = lab.run(Case("gpt", {}, COMPILE | graphs("full_iteration"), job=trained))
    assert found["figures"] == pytest.approx(eager["figures"], rel=1e-10)
    assert any(way == "compiled" for _, way in found["counts"])
