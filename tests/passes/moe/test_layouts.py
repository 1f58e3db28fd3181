"""Layouts follow what calls do to the index of a token, an expert and a feature."""

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from passes.moe.token_rows import Counts, Layout, Part, followed
from passes.program.ops.aten import aten, shape_of
from passes.rules.table import rule_of
from passes.rules.trials import called

TOKENS, EXPERTS, FEATURES = (2, 3), 4, 5
EXPERT = Part(Counts.EXPERTS, EXPERTS)
START = Layout.of(TOKENS, [EXPERT], [FEATURES])
SHAPE = (*TOKENS, EXPERTS, FEATURES)


def made(
    op: Any, *layouts: Layout, shapes: Sequence[Sequence[int]] = (SHAPE,), args: Sequence[Any] = ()
) -> Layout | None:
    """The layout of the result of a call on values of these shapes."""
    node, _ = called(op, *(torch.zeros(*shape) for shape in shapes), *args)
    rule = rule_of(node)
    assert rule is not None
    return followed(rule, dict(enumerate(layouts)), len(shape_of(node)))


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
    permuted = made(aten.permute.default, START, args=[dims])
    assert permuted is not None
    layout = made(aten.reshape.default, permuted, shapes=[shape], args=[merged])
    assert layout is not None
    for counts in (Counts.TOKENS, Counts.EXPERTS) if layout.is_pure else ():
        expected = index_of(counts).permute(dims).reshape(merged)
        assert torch.equal(said_by(layout, tuple(merged), counts), expected)


@pytest.mark.parametrize("shape", [[6, 4, 5], [3, 2, 4, 5], [6, 2, 2, 5], [6, 2, 10], [2, 12, 5]], ids=str)
def test_tokens_and_experts_may_be_split_again(shape):
    flat = made(aten.reshape.default, START, args=[[6, 4, 5]])
    assert flat is not None
    layout = made(aten.reshape.default, flat, shapes=[[6, 4, 5]], args=[shape])
    assert layout is not None
    for counts in (Counts.TOKENS, Counts.EXPERTS):
        assert torch.equal(said_by(layout, tuple(shape), counts), index_of(counts).reshape(shape))


def test_values_meet_where_their_dims_count_the_same():
    gates, tokens = Layout.of(TOKENS, [EXPERT], [1]), Layout.of(TOKENS, features=[FEATURES])
    assert made(aten.mul.Tensor, START, gates, shapes=[SHAPE, (*TOKENS, EXPERTS, 1)]) == START
    assert made(aten.mul.Tensor, START, START, shapes=[SHAPE, SHAPE]) == START
    swapped = made(aten.permute.default, tokens, shapes=[(*TOKENS, FEATURES)], args=[[1, 0, 2]])
    assert swapped is not None
    square = Layout.of((3, 3))
    crossed = made(aten.permute.default, square, shapes=[(3, 3)], args=[[1, 0]])
    assert crossed is not None
    assert made(aten.mul.Tensor, square, crossed, shapes=[(3, 3), (3, 3)]) is None  # b meets s


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.sum.dim_IntList, [[2]]),
        (aten.softmax.int, [1]),
        (aten.slice.Tensor, [2, 0, 2]),
        (aten.select.int, [0, 1]),
        (aten.cumsum.default, [1]),
        (aten.layer_norm.default, [[EXPERTS, FEATURES]]),
        (aten.reshape.default, [[2, 3, 5, 4]]),
    ],
    ids=str,
)
def test_no_layout_where_tokens_or_experts_are_mixed(op, args):
    assert made(op, START, args=args) is None


@pytest.mark.parametrize(
    ("op", "args", "features"),
    [
        (aten.sum.dim_IntList, [[3]], []),
        (aten.sum.dim_IntList, [[3], True], [1]),
        (aten.softmax.int, [-1], [5]),
        (aten.slice.Tensor, [3, 1, 4], [3]),
        (aten.split.Tensor, [2, -1], [2]),
        (aten.topk.default, [2], [2]),
        (aten.layer_norm.default, [[FEATURES]], [5]),
    ],
    ids=str,
)
def test_features_may_be_mixed(op, args, features):
    assert made(op, START, args=args) == Layout.of(TOKENS, [EXPERT], features)


@pytest.mark.parametrize(
    ("layout", "is_so"),
    [
        (Layout.of(TOKENS, features=[FEATURES]), True),
        (Layout.of([6], [Part(Counts.CHOICES, 2)], [FEATURES]), True),
        (Layout(Layout.of(TOKENS).axes[::-1]), False),
        (Layout((START.axes[2], *START.without(2).axes)), False),
    ],
)
def test_the_order_of_tokens(layout, is_so):
    assert layout.is_by_token() == is_so
