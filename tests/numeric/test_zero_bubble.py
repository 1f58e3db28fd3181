"""Gradients of weights that wait: what zero_bubble trains is what one process trains, and what 1f1b trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.pipeline.schedule import Action, Order, SchedulePlan
from runtime import Engine
from tests.tools.laboratory import Case, Lab, name_of
from tests.tools.limits import HANG_SECONDS

FAMILIES = ["gpt", "gpt2", "llama", "t5", "bert"]
SIZES = (8, 1)  # sequences of a step, of a microbatch


def rest(**more: Any) -> dict[str, Any]:
    return {"pipeline": {"schedule": "zero_bubble"}, **more}


CASES = [(model, {"tp": 2, "pp": 2}) for model in FAMILIES]
CASES += [(model, {"pp": 4}) for model in ("gpt", "gpt2", "t5")]


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "layout"), CASES, ids=name_of)
def test_families_equal_one_process(lab: Lab, model: str, layout: dict[str, int]) -> None:
    case = Case(model, layout, rest(), *SIZES)
    assert lab.plan(case).schedule.has_weights
    assert lab.check(case).wrong == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ({"tp": 2, "pp": 2}, {"tensor_parallel": {"sequence_parallel": True}}),
        ({"tp": 2, "pp": 2}, {"tensor_parallel": {"sequence_parallel": True, "regather": True}}),
        ({"pp": 2}, {"recompute": "full"}),
        ({"tp": 2, "pp": 2}, {"recompute": "selective", "tensor_parallel": {"sequence_parallel": True}}),
        ({"pp": 2}, {"cuda_graphs": {"impl": "emulate", "warmup_steps": 1}}),
        ({"tp": 2, "pp": 2}, {"cuda_graphs": {"impl": "emulate", "warmup_steps": 1}}),
        ({"pp": 2, "dp": 2}, {"optimizer": {"bucket_size": 500}}),
        ({"pp": 2, "dp": 2}, {"optimizer": {"zero": 0}}),
        ({"tp": 2, "pp": 2, "dp": 2}, {}),
        ({"pp": 4, "dp": 2}, {"optimizer": {"bucket_size": 500}}),
    ],
    ids=str,
)
def test_with_what_else_there_is_it_equals_one_process(lab: Lab, mesh: dict[str, int], more: dict[str, Any]) -> None:
    assert lab.check(Case("gpt", mesh, rest(**more), 16, 1)).wrong == []


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["experts", "llama-tied", "skips", "stopped-gradients"])
def test_experts_and_unusual_graphs_equal_one_process(lab: Lab, model: str) -> None:
    assert lab.check(Case(model, {"tp": 2, "pp": 2}, rest(), *SIZES)).wrong == []


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_sequences", [2, 3])
def test_fewer_microbatches_than_ranks_equal_one_process(lab: Lab, num_sequences: int) -> None:
    assert lab.check(Case("gpt", {"pp": 4}, rest(), num_sequences, 1)).wrong == []


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 2, "dp": 2}, {"tp": 2, "pp": 2}], ids=name_of)
def test_it_trains_as_1f1b_to_the_last_digits(lab: Lab, mesh: dict[str, int]) -> None:
    one = lab.run(Case("gpt", mesh, {}, *SIZES))[0]
    zero = lab.run(Case("gpt", mesh, rest(), *SIZES))[0]
    torch.testing.assert_close(zero.losses, one.losses, rtol=1e-12, atol=0)
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(zero.gradients[name], gradient, rtol=1e-11, atol=1e-12)
    for name, value in one.parameters.items():
        torch.testing.assert_close(zero.parameters[name], value, rtol=0, atol=1e-9)


ONE_RANK = tuple(Action(kind, microbatch, 0) for kind, microbatch in zip("FBFBWW", (0, 0, 1, 1, 0, 1), strict=True))
MUTANTS = {
    "a W left out": (ONE_RANK[:-2] + ONE_RANK[-1:], "weight gradients that no W has computed"),
    "a W run twice": (ONE_RANK + ONE_RANK[-1:], "no backward has deferred work"),
    "a W behind the last": (ONE_RANK[:-2] + ONE_RANK[:-3:-1], "came after the reduction of its bucket"),
}


def ordered(decided: Any, batches: list[dict[str, Tensor]], orders: dict[str, Order]) -> dict[str, Any]:
    """Gradients of one step of a rank that knows the plan's order, and runs another; or what it says of it."""
    schedule, found = SchedulePlan("custom", 2, (ONE_RANK,)), dict[str, Any]()
    for name, order in orders.items():
        with Engine(replace(decided, schedule=schedule), timeout_seconds=HANG_SECONDS) as engine:
            engine.executor.order = order
            try:
                engine.forward_backward(batches[0])
                found[name] = engine.gather_gradients()
            except Exception as error:
                found[name] = str(error)
    return found


@pytest.mark.thorough
def test_an_engine_sees_a_w_that_is_left_out_or_comes_twice_or_too_late(lab: Lab) -> None:
    orders = {"as planned": ONE_RANK} | {name: order for name, (order, _) in MUTANTS.items()}
    (found,) = lab.run(Case("gpt", {}, {}, 4, job=ordered, job_arguments=(orders,)))
    at_once = lab.run(Case("gpt", {}, {}, 4))[0].gradients
    for name, gradient in found["as planned"].items():
        torch.testing.assert_close(gradient, at_once[name], rtol=1e-11, atol=1e-12)
    for name, (_, words) in MUTANTS.items():
        assert words in str(found[name]), name
