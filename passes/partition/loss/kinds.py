"""The relation of a microbatch's value to the same value of the global batch in one process.

    WHOLE     the same: parameters, constants, counts of the global batch, and values made of them
    ROWS(d)   the microbatches' values, one after the other along dim d, are the global one
    UNIT      made of one sequence alone: a loop over the batch takes them one by one
    SHARE     the microbatches' values add up to the global one, term by term (passes.partition.loss.shares)
    LOOSE(d)  … if summed over dim d too
    UNKNOWN   none of these

A value may be made of a part of the microbatch: one sequence, or a chunk. Once equal computations of all parts are
summed or concatenated, the result is a value of the full microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

WHOLE, ROWS, UNIT, SHARE, LOOSE, UNKNOWN = "whole", "rows", "unit", "share", "loose", "unknown"
MEANS = "means"  # the order of a share that holds a mean over its part
PLACES = "places"  # the order of the rows 0, 1, 2 …, the rows' places in the batch


@dataclass(frozen=True, slots=True)
class Part:
    """The microbatch from ``start`` to ``stop``, both of 0 … 1. ``even``: all parts of it are equally long."""

    start: Fraction
    stop: Fraction
    even: bool = True


@dataclass(frozen=True, slots=True)
class Kind:
    """``part``: the part of the microbatch that it is made of, if not all. ``order``: of rows that are not in the
    batch's order.

    ``like``: values of the same ``like`` are made in the same way, each of its own part.
    """

    name: str
    dim: int = 0
    part: Part | None = None
    order: Any = None
    like: int = 0


whole, unknown, share = Kind(WHOLE), Kind(UNKNOWN), Kind(SHARE)


def are_complete(kinds: Sequence[Kind]) -> bool:
    """Whether all equal values together cover the full microbatch; means of chunks need equal chunks."""
    alike: dict[int, list[Part]] = {}
    for kind in kinds:
        if kind.part is None or (kind.order == MEANS and not kind.part.even):
            return False
        alike.setdefault(kind.like, []).append(kind.part)
    return all(tile([(part.start, part.stop) for part in parts]) for parts in alike.values())


def tile(ranges: list[tuple[Any, Any]], stop: Any = 1) -> bool:
    """Whether the ranges, sorted, fill 0 … stop without a gap and without an overlap."""
    found = sorted(ranges)
    ends = [0, *(b for _, b in found)]
    return bool(found) and ends[-1] == stop and all(a == end for (a, _), end in zip(found, ends, strict=False))
