"""Bytes in shards by formula: parameters, gradients and moments of a rank for each ``zero``; full ones for a time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from planner.cost.whole import Apart, Filling, most_gradients, most_until_weights
from planner.pipeline.actions import Action, Order
from tests.models.plannable import build, spec_of
from tests.tools.captures import plan_again

DP = 4
NORM, MATRIX, OTHER = (0, 0), (0, 1), (1, 0)
fills = partial(Filling, NORM)
# bytes of an element, by (zero, precision): parameters, gradients, optimizer; (whole, share of one rank)
FORMULA = {
    (0, "float32"): ((4, 0), (4, 0), (8, 0)),
    (1, "float32"): ((4, 0), (4, 0), (0, 8)),
    (2, "float32"): ((4, 0), (0, 4), (0, 8)),
    (3, "float32"): ((0, 4), (0, 4), (0, 8)),
    (1, "bfloat16"): ((2, 0), (4, 0), (0, 12)),
    (2, "bfloat16"): ((2, 0), (0, 4), (0, 12)),
    (3, "bfloat16"): ((0, 2), (0, 4), (0, 12)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize(("zero", "precision"), FORMULA, ids=str)
def test_bytes_of_a_rank_are_those_of_the_formula(model: str, zero: int, precision: str):
    asked = {"zero": zero, "alignment": "none"}
    given = {"mesh": {"dp": DP}, "batch": {"global": 8, "micro": 1}, "optimizer": asked}
    made = plan_again(build(model), spec_of(model, **given, precision={"parameters": precision}))
    elements = sum(buffer.num_elements for buffer in made.optimizer.buffers)  # buckets end on multiples of dp
    registered = made.memory[0].parameters - _bytes(FORMULA[zero, precision][0], elements)
    assert registered == _registered(model, precision)
    assert made.memory[0].gradients == _bytes(FORMULA[zero, precision][1], elements)
    assert made.memory[0].optimizer == _bytes(FORMULA[zero, precision][2], elements)
    assert (made.memory[0].whole > 0) == (zero >= 2)


def _bytes(of_element: tuple[int, int], elements: int) -> int:
    whole, share = of_element
    return whole * elements + share * elements // DP


def _registered(model: str, precision: str) -> int:
    """Bytes of the model's own buffers: those that are left without a data-parallel layout."""
    spec = spec_of(model, mesh={}, optimizer={"alignment": "none"}, precision={"parameters": precision})
    made = plan_again(build(model), spec)
    size = {"float32": 4, "bfloat16": 2}[precision]
    return made.memory[0].parameters - size * sum(buffer.num_elements for buffer in made.optimizer.buffers)


@pytest.mark.parametrize(
    ("buckets", "most"),
    [
        ([], 0),
        ([fills(7, 0, (1, 5))], 7),
        (
            [fills(3, 0, (1, 2)), fills(5, 1, (3, 4)), fills(2, 2, (5, 6))],
            8,
        ),  # one fills, the one before is on its way
        (
            [fills(4, 0, (0, 9)), fills(5, 1, (3, 4)), fills(2, 2, (5, 6))],
            11,
        ),  # read first and last: open throughout
        (
            [fills(3, 2, (1, 2)), fills(5, 1, (3, 4)), fills(2, 0, (5, 6))],
            10,
        ),  # none begins before the last is full
    ],
)
def test_full_gradients_are_those_that_fill_and_the_sum_on_its_way(buckets: list[Filling], most: int):
    assert most_gradients(buckets) == most


ONE, TWO = frozenset({NORM}), frozenset({MATRIX})
CHUNKS = [Apart(ONE, TWO, {MATRIX: 10, NORM: 1}), Apart(frozenset(), frozenset({OTHER}), {OTHER: 100})]


@pytest.mark.parametrize(
    ("order", "most"),
    [
        ("F0.0 B0.0 W0.0", 11),
        ("F0.0 F1.0 B0.0 B1.0 W0.0 W1.0", 11),  # the first W sums the norms of both backwards
        ("F0.0 F0.1 B0.1 B0.0 W0.1 W0.0", 101),  # a norm of one chunk waits while the other sums
        ("F0.0 F0.1 B0.1 W0.1 B0.0 W0.0", 100),
        ("F0.0 F1.0 B0.0 B1.0 W0.0 F0.1 B0.1 W1.0 W0.1", 100),  # nothing of a chunk is held beyond its W
    ],
)
def test_gradients_that_wait_are_held_until_the_next_weights_of_their_chunk(order: str, most: int):
    assert most_until_weights(_order(order), CHUNKS) == most


def test_a_bucket_that_a_weights_action_gives_nothing_opens_for_its_sum_alone():
    several = Apart(frozenset({(1, 0), (1, 1)}), TWO, {(1, 0): 5, (1, 1): 5, MATRIX: 10})
    assert most_until_weights(_order("F0.0 F1.0 B0.0 B1.0 W0.0"), [several]) == 20
    assert most_until_weights(_order("B0.0 W0.0"), [replace(several, early=frozenset())]) == 20
    apart = replace(several, sizes={(1, 0): 5, (1, 1): 5, (1, 2): 5, MATRIX: 10}, early=frozenset())
    assert most_until_weights(_order("B0.0 W0.0"), [apart]) == 20


def _order(text: str) -> Order:
    return tuple(Action(word[0], *map(int, word[1:].split("."))) for word in text.split())
