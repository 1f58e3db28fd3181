"""Carry a cut through the factors of a call, from an operand to the result or back: dims may merge and split.

[3·h] in three segments     seen as [.., 3, heads, d] each segment is heads·d, and the cut falls on heads
[hq + hk + hv]              seen as [heads_q + heads_k + heads_v, d] the segments are counted in larger elements
"""

from __future__ import annotations

from itertools import accumulate
from math import gcd
from operator import mul

from passes.rules.rule import OpRule
from passes.types.types import Placement, Segment

Ends = tuple[int, int]  # an operand, or RESULT, and the one that the cut is carried to


def projected(cut: Placement, rule: OpRule, ends: Ends, shape: tuple[int, ...], tp: int) -> Placement | None:
    """``cut`` of the first of ``ends`` as a cut of the second, which has ``shape``; None if it does not survive.

    Padding follows a dim that stays one.
    """
    source, target = ends
    factor = rule.sole(source, cut.dim)
    place = factor.at(target) if factor is not None else None
    if place is not None and rule.sole(target, place.dim) is factor:
        return cut.moved(place.dim)
    if cut.padding:
        return None
    is_even = len(set(cut.segments)) == 1 and cut.segments[0].sharded
    return (_ranks if is_even else _segments)(cut, rule, ends, shape, tp)


def _ranks(cut: Placement, rule: OpRule, ends: Ends, shape: tuple[int, ...], tp: int) -> Placement | None:
    """Even segments: the index of a rank in them is a factor of its own, and follows alone; of one rank the outermost
    part of a segment does."""
    size = cut.segments[0].size
    inners = [size // tp] if tp > 1 else [n for n in _strides(rule, ends[0], cut.dim) if size % n == 0 and n < size]
    for inner in inners:
        if (at := rule.carried(ends[0], cut.dim, inner, size // inner, ends[1])) is not None:
            run = size // inner * at[1]
            return Placement("V", at[0], (Segment(run),) * (shape[at[0]] // run))
    return None


def _strides(rule: OpRule, operand: int, dim: int) -> list[int]:
    """Of the factors of a dim, innermost first."""
    return list(accumulate((f.size for f in rule.along(operand, dim)), mul, initial=1))


def _segments(cut: Placement, rule: OpRule, ends: Ends, shape: tuple[int, ...], tp: int) -> Placement | None:
    """Uneven or replicated segments stay a dim of their own, counted in larger or smaller elements."""
    unit = gcd(*(s.local(tp) for s in cut.segments))
    count = sum(cut.sizes) // unit
    at = rule.carried(ends[0], cut.dim, unit, count, ends[1])
    if at is None or at[1] * count != shape[at[0]]:
        return None
    dim, inner = at
    return Placement("V", dim, tuple(Segment(s.size // unit * inner, s.sharded) for s in cut.segments))
