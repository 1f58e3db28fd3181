"""Layouts follow what reshape and permute do to the index of a token, an expert and a feature."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.experts.layouts import Counts, Layout, Part, aligned

TOKENS, EXPERTS, FEATURES = (2, 3), 4, 5
EXPERT = Part(Counts.EXPERTS, EXPERTS)
START = Layout.of(TOKENS, [EXPERT], [FEATURES])
SHAPE = (*TOKENS, EXPERTS, FEATURES)


def index_of(counts: Counts) -> torch.Tensor:
    """Of each element of [2, 3, 4, 5] the token, expert or feature that it is of."""
    places = torch.meshgrid(*(torch.arange(n) for n in SHAPE), indexing="ij")
    return {
        Counts.TOKENS: places[0] * TOKENS[1] + places[1],
        Counts.EXPERTS: places[2],
        Counts.FEATURES: places[3],
    }[counts]


def said_by(layout: Layout, shape: tuple[int, ...], counts: Counts) -> torch.Tensor:
    """The same, from a layout alone."""
    found = torch.zeros(shape, dtype=torch.int64)
    for dim, axis in enumerate(layout.axes):
        inner = shape[dim]
        at = torch.arange(shape[dim]).view(-1, *[1] * (len(shape) - dim - 1))
        for part in axis:
            inner //= part.size
            if part.counts is counts:
                found = found + (at // inner) % part.size * (part.stride or 1)
    return found


@given(dims=st.permutations(range(4)), data=st.data())
def test_a_layout_says_of_which_token_and_expert_an_element_is(dims, data):
    shape = [SHAPE[d] for d in dims]
    first = data.draw(st.integers(0, 3))
    merged = [*shape[:first], prod(shape[first : first + 2]), *shape[first + 2 :]]
    layout = START.permuted(dims).reshaped(merged)
    assert layout is not None
    for counts in (Counts.TOKENS, Counts.EXPERTS) if layout.is_pure else ():
        expected = index_of(counts).permute(dims).reshape(merged)
        assert torch.equal(said_by(layout, tuple(merged), counts), expected)


def test_tokens_may_be_split_again_and_experts_may_not():
    flat = START.reshaped([6, 4, 5])
    assert flat is not None
    assert flat.reshaped([3, 2, 4, 5]) is not None
    assert START.reshaped([6, 2, 2, 5]) is None


def test_values_meet_where_their_dims_count_the_same():
    gates, tokens = Layout.of(TOKENS, [EXPERT], [1]), Layout.of(TOKENS, features=[FEATURES])
    assert aligned([START, gates], 4) == START
    assert aligned([START, tokens], 4) is None  # b meets s


@pytest.mark.parametrize(
    ("layout", "is_so"),
    [
        (Layout.of(TOKENS, features=[FEATURES]), True),
        (Layout.of([6], [Part(Counts.CHOICES, 2)], [FEATURES]), True),
        (Layout.of(TOKENS).permuted([1, 0]), False),
        (START.permuted([2, 0, 1, 3]), False),
    ],
)
def test_the_order_of_tokens(layout, is_so):
    assert layout.is_by_token() == is_so
