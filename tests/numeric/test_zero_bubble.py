"""Gradients of weights that wait: what zero_bubble trains is what one process trains, and what 1f1b trains; and the
same with two chunks a rank in a v.
"""

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
CASES += [(model, {"tp": 2, "pp": 2}) for model in ("experts", "llama-tied", "skips", "stopped-gradients")]


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
@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_sequences", [2, 3])
def test_fewer_microbatches_than_ranks_equal_one_process(lab: Lab, num_sequences: int) -> None:
    assert lab.check(Case("gpt", {"pp": 4}, rest(), num_sequences, 1)).wrong == []


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


# ---- Two chunks a rank in a v, with gradients of weights as actions of their own, give what one process gives


V: dict[str, Any] = {"pipeline": {"schedule": "zero_bubble_v"}}
SEQUENCE = {"tensor_parallel": {"sequence_parallel": True}}
GRAPHS = {"cuda_graphs": {"impl": "emulate", "scope": ["attn", "mlp"], "warmup_steps": 1}}
TWO = {"pp": 2, "vpp": 2}
IN_A_V = {
    "tied embedding and head": Case("gpt2", TWO, V),
    "untied": Case("gpt2-untied", TWO, V),
    "llama": Case("llama", TWO, V),
    "encoder and decoder": Case("t5", TWO, V),
    "values that skip stages": Case("skips", TWO, V),
    "four ranks": Case("gpt2-8-layers", {"pp": 4, "vpp": 2}, V),
    "four ranks of llama": Case("llama-8-layers", {"pp": 4, "vpp": 2}, V),
    "fewer microbatches than ranks": Case("gpt2-8-layers", {"pp": 4, "vpp": 2}, V, num_sequences=4),
    "with tp": Case("gpt2", {"tp": 2} | TWO, V),
    "with tp along the sequence": Case("llama", {"tp": 2} | TWO, V | SEQUENCE),
    "with dp": Case("gpt2", {"dp": 2} | TWO, V),
    "with dp, tied, in small buckets": Case("llama-tied", {"dp": 2} | TWO, V | {"optimizer": {"bucket_size": 500}}),
    "blocks computed again": Case("gpt2", TWO, V | {"recompute": "full"}),
    "attention computed again": Case("llama", TWO, V | {"recompute": "selective"}),
    "graphs": Case("gpt2", TWO, V | GRAPHS, num_sequences=16),
    "a split of ranks": Case("gpt2-8-layers", TWO, {"pipeline": V["pipeline"] | {"split": [[1, 2], [4, 1]]}}),
    "a layout": Case("gpt2", TWO, {"pipeline": V["pipeline"] | {"split": "Et*2|t|t|L"}}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", IN_A_V)
def test_a_v_equals_one_process(lab: Lab, name: str) -> None:
    assert lab.check(IN_A_V[name]).wrong == []


LOOP: dict[str, Any] = {"pipeline": {"schedule": "interleaved_1f1b"}}
AS_OTHERS = [
    *(("gpt", mesh, {}, rest(), SIZES) for mesh in ({"pp": 2}, {"pp": 2, "dp": 2}, {"tp": 2, "pp": 2})),
    *(("llama-tied", mesh, LOOP, V, (8, 2)) for mesh in (TWO, {"dp": 2} | TWO, {"tp": 2} | TWO)),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "mesh", "other", "own", "sizes"), AS_OTHERS, ids=str)
def test_it_trains_as_schedules_that_split_no_backward_to_the_last_digits(
    lab: Lab, model: str, mesh: dict[str, int], other: dict[str, Any], own: dict[str, Any], sizes: tuple[int, int]
) -> None:
    truth, found = (lab.run(Case(model, mesh, pipeline, *sizes))[0] for pipeline in (other, own))
    torch.testing.assert_close(found.losses, truth.losses, rtol=1e-12, atol=0)
    for name, gradient in truth.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-11, atol=1e-12)
    for name, value in truth.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=0, atol=1e-9)
