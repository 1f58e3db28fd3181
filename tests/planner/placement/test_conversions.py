"""Which type may become which, and what moves for it."""

from __future__ import annotations

import pytest

from passes.types.conversions import ALL_TO_ALL, TABLE, conversion
from passes.types.types import I, P, Placement, R, V
from planner.placement.solve import Weights

TYPES = (I, R, P, V(0, 4))


@pytest.mark.parametrize("value", TYPES, ids=str)
def test_what_is_read_as_it_is_made_moves_nothing(value: Placement):
    found = conversion(value, value, grad=True, parameter=False)
    assert found is not None
    assert (found.forward, found.backward) == ("", "")


def test_the_backward_of_a_change_is_that_of_the_change_back():
    """f: I → R sums gradients as g: P → I sums values; and so gather and scatter."""
    for there, back in ((("I", "R"), ("P", "I")), (("V", "R"), ("P", "V"))):
        a, b = TABLE[there], TABLE[back]
        assert (a.forward, a.backward) == (b.backward, b.forward)


def test_a_parameter_is_never_gathered_and_a_cut_moves_to_another_dim_only_where_allowed():
    assert conversion(V(0, 4), R, grad=True, parameter=True) is None
    assert conversion(V(0, 4), V(1, 4), grad=True, parameter=False) is None
    moved = conversion(V(0, 4), V(1, 4), grad=True, parameter=False, exchange=True)
    assert moved is not None
    assert moved.forward == ALL_TO_ALL


def test_without_a_gradient_only_the_forward_counts():
    for before in TYPES:
        for after in TYPES:
            found = conversion(before, after, grad=False, parameter=False)
            assert found is None or found.backward == ""


@pytest.mark.parametrize("tp", [2, 4, 64])
def test_the_weights_keep_the_bounds_that_their_docstring_derives(tp: int):
    weights, share = Weights(), 1 - 1 / tp
    moved = 16 * (weights.bytes + weights.call)
    assert moved < share * weights.parameters
    assert weights.parameters + moved < share * weights.flops
    assert weights.parameters + moved < weights.reshard < share * weights.flops
    assert weights.parameters + moved < weights.logits
    assert 2 * (weights.bytes + weights.call) < weights.detour < moved
