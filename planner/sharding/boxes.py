"""Boxes of a full tensor: where the elements of a rank's flattened part lie, for any layout.

    a run of the flattened part  --rectangles-->  boxes of the part  --in_whole-->  boxes of the full tensor

A box does not depend on tp, dp or padding, so that any layout can read what another has written. A rank's part is given
by a placement over one axis and, for experts, by its ep rank; the two shard different dims:

    [.., n, ..] --pad--> [.., n + padding, ..] --Placement.slices(size, rank)--> [.., n / size, ..]       over tp or etp
    [.., E, ..] --ExpertPart.first(ep, ep_rank)--> [.., E / ep, ..]                                        over ep

A tensor of a single expert is complete on one ep rank, and absent on the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Protocol

from passes.errors import require
from passes.moe.layers import ExpertPart
from passes.types.types import Placement
from planner.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Box:
    """Elements [``start``, ``stop``) of each dim; the only element of a tensor without dims."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices of the full tensor."""
        return tuple(map(slice, self.start, self.stop))

    def intersection(self, other: Box) -> Box | None:
        """Return the common elements; None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that holds ``outer``."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True))


@dataclass(frozen=True, slots=True)
class Piece:
    """A ``box`` of the full tensor, and its elements in a run of the rank's flattened part.

    Elements [``first``, ``first`` + size of ``outer``) of the run have the shape of ``outer``, a box of the part;
    ``inner`` within it is ``box``. ``is_shared``: every rank of the axis holds the box.
    """

    box: Box
    first: int
    outer: Box
    inner: Box
    is_shared: bool


def rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that together, in order, have the elements [start, stop) of a flattened tensor of ``shape``."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner, rest = prod(shape[1:]), tuple(shape[1:])
    row, end_row = start // inner, stop // inner
    if start % inner:
        until = min(stop - row * inner, inner)
        yield from _in_row(row, rectangles(rest, start % inner, until))
        row += 1
    if row < end_row:
        yield Box((row, *(0 for _ in rest)), (end_row, *rest))
    if row <= end_row and stop % inner:
        yield from _in_row(end_row, rectangles(rest, 0, stop % inner))


def pieces_of_run(
    part: Part, shape: Sequence[int], local_shape: Sequence[int], start: int, stop: int
) -> Iterator[Piece]:
    """Yield the pieces of elements [start, stop) of a flattened part, without padding. ``shape``: the full tensor's."""
    first = start
    for outer in rectangles(local_shape, start, stop):
        yield from _in_whole(part, shape, outer, first - start)
        first += outer.num_elements


def tiles(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Return whether the boxes hold each element of ``shape`` exactly once.

    The indicator functions of the boxes add up to that of the full tensor if and only if their signed corners do.
    """
    boxes = list(boxes)
    if not prod(shape):
        return not boxes
    cut = _cut_dims(shape, boxes)
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, box in [(1, Box.whole(shape)), *((-1, b) for b in boxes)]:
        for corner in product(*(((box.start[d], 1), (box.stop[d], -1)) for d in cut)):
            corners[tuple(place for place, _ in corner)] += sign * prod(s for _, s in corner)
    return not any(corners.values())


def num_corners(shape: Sequence[int], boxes: Sequence[Box]) -> int:
    """Return the number of corners that ``tiles`` visits."""
    return len(boxes) << len(_cut_dims(shape, boxes))


def _cut_dims(shape: Sequence[int], boxes: Sequence[Box]) -> list[int]:
    return [d for d, n in enumerate(shape) if any((b.start[d], b.stop[d]) != (0, n) for b in boxes)]


def _in_row(row: int, boxes: Iterable[Box]) -> Iterator[Box]:
    for box in boxes:
        yield Box((row, *box.start), (row + 1, *box.stop))


def _in_whole(part: Part, shape: Sequence[int], outer: Box, first: int) -> Iterator[Piece]:
    ranges = part.ranges
    runs = [list(_runs_of_dim(part, ranges[dim], dim, shape[dim], outer)) for dim in ranges]
    for chosen in product(*runs):
        places = dict(zip(ranges, chosen, strict=True))
        local = [places[d][0] if d in places else (a, b) for d, (a, b) in enumerate(_extents(outer))]
        whole = [places[d][1] if d in places else (a, b) for d, (a, b) in enumerate(_extents(outer))]
        yield Piece(_box(whole), first, outer, _box(local), any(is_shared for *_, is_shared in chosen))


def _runs_of_dim(
    part: Part, ranges: Sequence[tuple[int, int]], dim: int, size: int, outer: Box
) -> Iterator[tuple[tuple[int, int], tuple[int, int], bool]]:
    """Yield (range in the part, range in the full tensor, whether all ranks of the axis hold it) of ``outer`` along a
    sharded dim.
    """
    segments = part.placement.segments if dim == part.placement.dim else ()
    for index, ((start, stop), (offset, _)) in enumerate(_placed(ranges)):
        first = max(outer.start[dim], offset)
        last = min(outer.stop[dim], offset + min(stop, size) - start)
        if first < last:
            shift = start - offset
            is_shared = bool(segments) and not segments[index].sharded
            yield (first, last), (first + shift, last + shift), is_shared


def _extents(box: Box) -> Iterator[tuple[int, int]]:
    return zip(box.start, box.stop, strict=True)


def _box(extents: Sequence[tuple[int, int]]) -> Box:
    return Box(tuple(a for a, _ in extents), tuple(b for _, b in extents))


Ranges = Mapping[int, tuple[tuple[int, int], ...]]  # sharded dim → half-open ranges in local order


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a tensor: ``placement`` over ``size`` ranks, of which it is ``rank``; ``expert`` over ``ep``."""

    placement: Placement
    size: int = 1
    rank: int = 0
    expert: ExpertPart | None = None
    ep: int = 1
    ep_rank: int = 0

    def __post_init__(self) -> None:
        is_twice = self.expert is not None and self.placement.is_sharded and self.placement.dim == self.expert.dim
        require(not is_twice, f"dim {self.placement.dim} of a stack of experts is cut over etp, and over ep")

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor of global ``shape``, on a rank that has one."""
        local = self.placement.local_shape(shape, self.size)
        return local if self.expert is None else self.expert.local_shape(local, self.ep)

    @property
    def ranges(self) -> Ranges:
        """The ranges of each sharded dim, in the padded global tensor."""
        ranges = {self.placement.dim: self.placement.slices(self.size, self.rank)} if self.placement.is_sharded else {}
        if self.expert is not None and self.expert.dim >= 0:
            first = self.expert.first(self.ep, self.ep_rank)
            ranges[self.expert.dim] = ((first, first + self.expert.num_experts // self.ep),)
        return ranges


class OfTensor(Protocol):
    """The sharding of a parameter: the plan's row, or a rank's LocalParameter."""

    @property
    def axis(self) -> str: ...

    @property
    def placement(self) -> Placement: ...

    @property
    def expert(self) -> ExpertPart | None: ...


def part_of(parameter: OfTensor, mesh: Mesh, place: Mapping[str, int]) -> Part:
    """Return the part of the rank at ``place`` (Mesh.place)."""
    return part_over(parameter.axis, parameter.placement, parameter.expert, mesh, place)


def part_over(axis: str, placement: Placement, expert: ExpertPart | None, mesh: Mesh, place: Mapping[str, int]) -> Part:
    """Return the part of the rank at ``place``, with ``placement`` over ``axis`` and ``expert`` over ep."""
    return Part(placement, mesh.size(axis), place[axis], expert, ep=mesh.ep, ep_rank=place["ep"])


def runs_in(ranges: Ranges, box: Box) -> Iterator[tuple[tuple[slice, ...], Box]]:
    """Yield the elements of ``box`` in a rank's part, as slices of the part and as a box of the full tensor.

    Each is contiguous in both. Padding lies outside ``box``.
    """
    for chosen in product(*map(_placed, ranges.values())):
        start, stop, shift = list(box.start), list(box.stop), [0] * len(box.start)
        for dim, ((first, last), (offset, _)) in zip(ranges, chosen, strict=True):
            start[dim], stop[dim], shift[dim] = max(start[dim], first), min(stop[dim], last), offset - first
        if all(a < b for a, b in zip(start, stop, strict=True)):
            local = tuple(slice(a + n, b + n) for a, b, n in zip(start, stop, shift, strict=True))
            yield local, Box(tuple(start), tuple(stop))


def _placed(of_dim: Sequence[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the (start, stop) of each range of a sharded dim in the full tensor, and in the part."""
    offset = 0
    for start, stop in of_dim:
        yield (start, stop), (offset, offset + stop - start)
        offset += stop - start
