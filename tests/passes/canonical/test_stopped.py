"""A gradient that every reader stops is stopped before what it would flow through; each case computes the same."""

import pytest
from expecttest import assert_expected_inline
from torch import Tensor

from tests.models.one_body import OneBody
from tests.tools.canonical import canonical


@pytest.mark.thorough
def test_a_straight_through_estimate_stops_its_gradient_first():
    assert_expected_inline(
        canonical(lambda _, x: x + ((x * 4).round() / 4 - x).detach()),
        """\
v0 = aten.detach(x)
v1 = aten.mul.Tensor(v0, 4)
v2 = aten.round(v1)
v3 = aten.div.Tensor(v2, 4)
v4 = aten.sub.Tensor(v3, v0)
v5 = aten.add.Tensor(x, v4)
""",
    )


def test_a_largest_element_without_a_gradient_is_amax():
    def scaled(m: OneBody, x: Tensor) -> Tensor:
        return x / x.abs().max(-1, keepdim=True).values.detach() - x.min(-1, keepdim=True).values

    assert_expected_inline(
        canonical(scaled),
        """\
v0 = aten.detach(x)
v1 = aten.abs(v0)
v2 = aten.amax(v1, [-1], True)
v3 = aten.div.Tensor(x, v2)
v4 = aten.min.dim(x, -1, True)
v5 = operator.getitem(v4, 0)
v6 = aten.sub.Tensor(v3, v5)
""",
    )


def test_a_value_that_one_reader_differentiates_keeps_its_gradient():
    def both(m: OneBody, x: Tensor) -> Tensor:
        y = x.sin()
        return y + y.cos().detach()

    assert_expected_inline(
        canonical(both),
        """\
v0 = aten.sin(x)
v1 = aten.detach(v0)
v2 = aten.cos(v1)
v3 = aten.add.Tensor(v0, v2)
""",
    )


@pytest.mark.thorough
def test_a_largest_element_whose_index_is_read_too_stays_a_pick():
    def picked(m: OneBody, x: Tensor) -> Tensor:
        largest, at = x.max(-1, keepdim=True)
        return x + largest.detach() * at

    assert_expected_inline(
        canonical(picked),
        """\
v0 = aten.detach(x)
v1 = aten.max.dim(v0, -1, True)
v2 = operator.getitem(v1, 0)
v3 = operator.getitem(v1, 1)
v4 = aten.mul.Tensor(v2, v3)
v5 = aten.add.Tensor(x, v4)
""",
    )


def test_one_piece_of_a_tuple_is_stopped_where_it_is_taken():
    def halved(m: OneBody, x: Tensor) -> Tensor:
        a, b = x.sin().chunk(2, -1)
        return m.scale * x + (a + b.detach()).repeat(1, 1, 2)

    found = canonical(halved)
    assert found.count("aten.detach") == 1
    assert "aten.detach(x)" not in found
