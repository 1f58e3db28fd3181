"""A schedule by hand, with forwards of one direction beside backwards of the other, trains as one process."""

from typing import Any

import pytest
from torch import Tensor

from passes.errors import PlanError
from planner import Plan
from planner.pipeline.simulate import format_schedule, simulate
from runtime import Engine
from tests.tools.comparison import compare
from tests.tools.laboratory import Case, Lab
from tests.tools.schedules import both_ways, drawn_schedule

TWO = {"pp": 2, "vpp": 2}
V = {"pipeline": {"schedule": "zero_bubble_v"}}


def is_in_order(seed: int, vpp: int, fold: str) -> bool:
    """Whether each link has its messages in one order: most drawn orders are refused for that."""
    try:
        simulate(drawn_schedule(seed, 2, vpp, 4, fold, has_weights=bool(seed % 2)))
    except PlanError:
        return False
    return True


def by_hand(**sizes: Any) -> dict[str, Any]:
    return {"pipeline": {"schedule": format_schedule(both_ways(**sizes))}}


TWO_RANKS = by_hand(pp=2, num_microbatches=4)
LOOP = {"pipeline": {"schedule": format_schedule(drawn_schedule(5, 2, 1, 4, "loop", has_weights=True))}}
CASES = {
    "two ranks": Case("gpt2", TWO, TWO_RANKS),
    "with dp": Case("llama-tied", {"dp": 2} | TWO, TWO_RANKS, num_sequences=16),
    "four ranks": Case("gpt2-8-layers", {"pp": 4, "vpp": 2}, by_hand(pp=4, num_microbatches=8), num_sequences=16),
    "a loop that is drawn": Case("gpt2", {"pp": 2}, LOOP),
}
DRAWN = {
    f"{folded}, seed {seed}": (seed, vpp, folded)
    for folded, vpp in (("loop", 1), ("v", 2))
    for seed in range(40)
    if is_in_order(seed, vpp, folded)
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_it_equals_one_process(lab: Lab, name: str) -> None:
    assert lab.check(CASES[name]).wrong == []


@pytest.mark.thorough
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DRAWN)
def test_an_order_that_is_drawn_equals_one_process(lab: Lab, name: str) -> None:
    seed, vpp, fold = DRAWN[name]
    order = format_schedule(drawn_schedule(seed, 2, vpp, 4, fold, has_weights=bool(seed % 2)))
    assert lab.check(Case("gpt2", {"pp": 2, "vpp": vpp}, {"pipeline": {"schedule": order}})).wrong == []


@pytest.mark.thorough
def test_in_bfloat16_it_rounds_as_the_schedule_that_sums_in_the_same_order(lab: Lab) -> None:
    half = {"precision": {"parameters": "bfloat16"}}
    report = lab.check(Case("gpt", TWO, TWO_RANKS | half))
    assert report.of("loss", "gradient") == []
    by_hand, of_kind = (lab.run(Case("gpt", TWO, rest | half))[0] for rest in (TWO_RANKS, V))
    assert compare(by_hand, of_kind).wrong == []


def test_a_batch_of_another_number_is_refused(lab: Lab) -> None:
    with pytest.raises(PlanError, match=r"shape \[4, 12\], the plan expects \[8, 12\]"):
        lab.run(Case("gpt", TWO, TWO_RANKS, job=half_a_batch))


def half_a_batch(plan: Plan, batches: list[dict[str, Tensor]]) -> float:
    engine = Engine(plan)
    return engine.train_step({name: value[:4] for name, value in batches[0].items()}).loss
