"""The range of a step, and when two layouts are as fast within what is known."""

from __future__ import annotations

import pytest

from planner.cluster.cluster import Uncertainty
from planner.cost.layout import CostPlan, is_as_fast

KNOWN = Uncertainty(compute=0.1, communication=0.3)


def step(**parts: float) -> CostPlan:
    return CostPlan(sum(parts.values()), **{"compute": 0.0, **parts}).with_range(KNOWN)


def test_each_part_adds_its_own_share() -> None:
    found = step(compute=10.0, tp_comm=2.0, pp_bubble=1.0, dp_comm=1.0)
    assert found.uncertain == pytest.approx(0.1 * 11 + 0.3 * 3)
    assert found.range == pytest.approx((14.0 - 2.0, 14.0 + 2.0))


def test_what_both_have_is_no_doubt() -> None:
    fast, slow = step(compute=10.0, tp_comm=1.0), step(compute=10.0, tp_comm=1.6)
    assert not is_as_fast(fast, slow, KNOWN)  # both ranges overlap, but collectives cost more in both, or less in both
    assert fast.range[1] > slow.range[0]


def test_collectives_for_a_bubble_may_be_worth_it_or_not() -> None:
    assert is_as_fast(step(compute=10.0, tp_comm=1.0), step(compute=10.0, pp_bubble=1.3), KNOWN)
    assert not is_as_fast(step(compute=10.0, tp_comm=1.0), step(compute=10.0, pp_bubble=2.0), KNOWN)


def test_without_doubt_only_equals_are_as_fast() -> None:
    sure = Uncertainty(compute=0.0, communication=0.0)
    one, other = CostPlan(1.0, 1.0).with_range(sure), CostPlan(1.0 + 1e-6, 1.0, tp_comm=1e-6).with_range(sure)
    assert is_as_fast(one, one, sure)
    assert not is_as_fast(one, other, sure)


def test_a_fifth_of_the_doubt_is_the_layouts_own() -> None:
    assert is_as_fast(step(compute=10.0), step(compute=10.2), KNOWN)
    assert not is_as_fast(step(compute=10.0), step(compute=10.3), KNOWN)
