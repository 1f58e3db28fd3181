"""Ranks over named axes: rank ↔ coordinate, and the rank groups of every axis.

    rank = Σ coordinate[axis] · stride[axis],   stride[axis] = product of the sizes left of it

The leftmost axis has stride 1, so its neighbours stay inside a node. A group of an axis holds the ranks that differ
only in this axis: a base for each position of the other axes, plus an offset for each member. All of it is integer
arithmetic: 16,384 ranks take milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from passes.errors import PlanError

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
DENSE_TOKENS = ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp", "tp-dp", "tp-dp-cp")
EXPERT_TOKENS = ("tp", "ep", "dp", "pp", "tp-ep", "tp-ep-pp", "ep-dp")


def masked_groups(sizes: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
    """Return the groups over the axes with a true ``mask``; axis 0 has stride 1. Groups and members ascend in rank."""
    strides = _strides(sizes)
    members = _offsets((n, s) for n, s, inside in zip(sizes, strides, mask, strict=True) if inside)
    bases = _offsets((n, s) for n, s, inside in zip(sizes, strides, mask, strict=True) if not inside)
    return [[base + offset for offset in members] for base in bases]


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[:axis]) for axis in range(len(sizes))]


def _offsets(axes: Iterable[tuple[int, int]]) -> list[int]:
    """Return every sum of i·stride over ``axes``, pairs (size, stride); the first axis varies fastest."""
    offsets = [0]
    for size, stride in axes:
        offsets = [offset + i * stride for i in range(size) for offset in offsets]
    return offsets


@dataclass(frozen=True, slots=True)
class RankGenerator:
    """Named axes over the ranks; ``axes[0]`` has stride 1. Raises PlanError if ep and cp are both larger than 1."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        size = dict(zip(self.axes, self.sizes, strict=True))
        if size.get("cp", 1) > 1 and size.get("ep", 1) > 1:
            raise PlanError(
                f"cp = {size['cp']} and ep = {size['ep']} are in one rank generator",
                where="mesh",
                fix="cp belongs to the dense generator and ep to the expert one: describe both axes with one Mesh",
            )

    @classmethod
    def of(cls, order: str, sizes: Mapping[str, int], owner: str = "") -> RankGenerator:
        """Return the axes of ``sizes`` in ``order``, which may lack axes of size 1. ``owner``: named in the error."""
        named = [axis for axis in order.split("-") if axis in sizes]
        missing = [axis for axis in sizes if axis not in named]
        for axis in missing:
            if sizes[axis] > 1:
                raise PlanError(
                    f"order `{order}` lacks the axis {axis} of size {sizes[axis]}"
                    + (f" for the {owner}" if owner else ""),
                    where="mesh.order",
                    fix=f"use {order}-pp" if axis == "pp" else f"add {axis} to the order, as in {DEFAULT_ORDER}",
                )
        axes = (*named, *missing)
        return cls(axes, tuple(sizes[axis] for axis in axes))

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    def stride(self, axis: str) -> int:
        """Return the distance in rank between neighbours along ``axis``."""
        return _strides(self.sizes)[self.axes.index(axis)]

    def mask(self, token: str) -> list[bool]:
        """Return, for each axis, whether ``token`` (such as ``tp`` or ``dp-cp``) names it."""
        chosen = token.lower().split("-")
        for axis in chosen:
            if axis not in self.axes:
                raise _unknown_axis(axis, self.axes, f"group `{token}`")
        return [axis in chosen for axis in self.axes]

    def groups(self, token: str) -> list[list[int]]:
        return masked_groups(self.sizes, self.mask(token))

    def group_of(self, token: str, rank: int) -> list[int]:
        """Return the group of ``token`` that contains ``rank``, without computing the others."""
        mask, strides, coordinate = self.mask(token), _strides(self.sizes), self.coordinate(rank)
        base = rank - sum(coordinate[a] * s for a, s, inside in zip(self.axes, strides, mask, strict=True) if inside)
        inside = ((n, s) for n, s, chosen in zip(self.sizes, strides, mask, strict=True) if chosen)
        return [base + offset for offset in _offsets(inside)]

    def index_in(self, token: str, rank: int) -> int:
        """Return the index of ``rank`` in its group of ``token``."""
        coordinate, chosen = self.coordinate(rank), token.split("-")
        sizes = [n if axis in chosen else 1 for axis, n in zip(self.axes, self.sizes, strict=True)]
        places = (coordinate[axis] if axis in chosen else 0 for axis in self.axes)
        return sum(place * stride for place, stride in zip(places, _strides(sizes), strict=True))

    def coordinate(self, rank: int) -> dict[str, int]:
        assert 0 <= rank < self.world_size, f"rank {rank} is outside a world of {self.world_size}"
        return {a: rank // s % n for a, n, s in zip(self.axes, self.sizes, _strides(self.sizes), strict=True)}

    def rank_of(self, coordinate: Mapping[str, int]) -> int:
        """Return the rank at ``coordinate``; a missing axis is 0."""
        assert all(0 <= i < self.sizes[self.axes.index(axis)] for axis, i in coordinate.items()), coordinate
        return sum(coordinate.get(axis, 0) * s for axis, s in zip(self.axes, _strides(self.sizes), strict=True))


def check_order(order: str) -> None:
    """Raise PlanError unless ``order`` names known axes, each at most once."""
    axes = order.split("-")
    for axis in axes:
        if axis not in AXES:
            raise _unknown_axis(axis, AXES, f"order `{order}`")
        if axes.count(axis) > 1:
            raise PlanError(
                f"order `{order}` names the axis {axis} more than once",
                where="mesh.order",
                fix=f"name each axis once, as in {DEFAULT_ORDER}",
            )


def _unknown_axis(axis: str, known: Sequence[str], place: str) -> PlanError:
    nearest = get_close_matches(axis, known, n=1)
    fix = (f"did you mean {nearest[0]}? " if nearest else "") + f"known: {', '.join(known)}"
    return PlanError(f"{place} names an unknown axis `{axis}`", where="mesh.order", fix=fix)
