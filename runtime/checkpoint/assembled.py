"""Read a part of an assembly: only the elements of its sources that the part has, straight into their place.

target = made[box]      Cat      each part that the box cuts, into its run of the target
                        Slice    the box moved
                        Permute  into the target with its dims permuted
                        View     the rows of the source that have elements of the box, in memory of their own
                        Call     every source in full, in memory of its own
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

from torch import Tensor

from planner.capture.hub.assembly import Assembly, Call, Cat, Permute, Shape, Slice, Source, View, inverse
from planner.files import allowed
from planner.sharding.boxes import Box
from planner.sharding.parts import Ranges, pieces

Read = Callable[[str, Box, Tensor], object]  # (name of a source, its elements, where they belong)
Range = tuple[int, int]


def whole_box(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def read_ranges(target: Tensor, made: Assembly, ranges: Ranges, read: Read) -> None:
    """The ``ranges`` of each dim, one after another; beyond the tensor is padding: its place in ``target`` stays."""
    for whole, local in pieces(ranges):
        place, box = target, whole_box(made.shape)
        for dim, (start, stop) in whole.items():
            stop = min(stop, made.shape[dim])
            place = place.narrow(dim, local[dim][0], max(stop - start, 0))
            box = _with(box, dim, start, stop)
        if place.numel():
            read_into(place, made, box, read)


def read_into(target: Tensor, made: Assembly, box: Box, read: Read) -> None:
    """Copy ``box`` of ``made`` to ``target``, which has its shape; casts to the dtype of ``target``."""
    if isinstance(made, Source):
        read(made.name, box, target)
    elif isinstance(made, Cat):
        _read_cat(target, made, box, read)
    elif isinstance(made, Slice):
        start, stop = box.start[made.dim] + made.start, box.stop[made.dim] + made.start
        read_into(target, made.whole, _with(box, made.dim, start, stop), read)
    elif isinstance(made, Permute):
        back = inverse(made.dims)
        inner = Box(tuple(box.start[dim] for dim in back), tuple(box.stop[dim] for dim in back))
        read_into(target.permute(back), made.whole, inner, read)
    elif isinstance(made, View):
        _read_view(target, made, box, read)
    else:
        target.copy_(_called(made, target, read)[box.slices_in(whole_box(made.shape))])


def _with(box: Box, dim: int, start: int, stop: int) -> Box:
    return Box((*box.start[:dim], start, *box.start[dim + 1 :]), (*box.stop[:dim], stop, *box.stop[dim + 1 :]))


def _read_cat(target: Tensor, made: Cat, box: Box, read: Read) -> None:
    dim, offset = made.dim, 0
    for part in made.parts:
        size = part.shape[dim]
        first, last = max(box.start[dim], offset), min(box.stop[dim], offset + size)
        if first < last:
            place = target.narrow(dim, first - box.start[dim], last - first)
            read_into(place, part, _with(box, dim, first - offset, last - offset), read)
        offset += size


def _read_view(target: Tensor, made: View, box: Box, read: Read) -> None:
    """Dims that only the shapes split or join are a group; of one, the rows of its first dim are read in full."""
    outer, inner = made.shape, made.whole.shape
    start, stop, places = [0] * len(inner), list(inner), []
    is_plain = True
    for own, others in _groups(outer, inner):
        wide = [dim for dim in own if outer[dim] != 1], [dim for dim in others if inner[dim] != 1]
        if len(wide[0]) <= 1 and [outer[d] for d in wide[0]] == [inner[d] for d in wide[1]]:
            for dim, other in zip(*wide, strict=True):
                start[other], stop[other] = box.start[dim], box.stop[dim]
            places.append((own, [(box.start[dim], box.stop[dim]) for dim in own], 0))
        else:
            is_plain = False
            row, other_row = prod(outer[dim] for dim in own[1:]), prod(inner[dim] for dim in others[1:])
            first, last = box.start[own[0]] * row, box.stop[own[0]] * row
            start[others[0]], stop[others[0]] = first // other_row, -(-last // other_row)
            places.append((own, None, first - start[others[0]] * other_row))
    part = Box(tuple(start), tuple(stop))
    if is_plain:
        read_into(target.view(part.shape), made.whole, part, read)
        return
    held = target.new_empty(part.shape)
    read_into(held, made.whole, part, read)
    target.copy_(_viewed(held, outer, inner, box, places))


def _viewed(held: Tensor, outer: Shape, inner: Shape, box: Box, places: list[tuple[list[int], Any, int]]) -> Tensor:
    """The box of the outer shape, of the rows that were read: each group as one dim, cut, and split again."""
    sizes = [prod(held.shape[dim] for dim in others) for _, others in _groups(outer, inner)]
    held, split = held.reshape(sizes), []
    for group, (own, kept, offset) in enumerate(places):
        if kept is not None:
            split += [stop - start for start, stop in kept]
            continue
        rows, rest = box.stop[own[0]] - box.start[own[0]], [outer[dim] for dim in own[1:]]
        held = held.narrow(group, offset, rows * prod(rest))
        split += [rows, *rest]
    held = held.reshape(split)
    for own, kept, _ in places:
        for dim in own[1:] if kept is None else ():
            held = held.narrow(dim, box.start[dim], box.stop[dim] - box.start[dim])
    return held


def _groups(outer: Shape, inner: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Dims of both shapes that have the same number of elements, the fewest together; in order."""
    i = j = 0
    while i < len(outer) or j < len(inner):
        own, others, sizes = [], [], [1, 1]
        while True:
            if sizes[0] <= sizes[1] and i < len(outer) and (sizes[0] < sizes[1] or not own):
                sizes[0] *= outer[i]
                own.append(i)
                i += 1
            elif j < len(inner) and (sizes[1] < sizes[0] or not others):
                sizes[1] *= inner[j]
                others.append(j)
                j += 1
            else:
                break
        yield own, others


def _called(made: Call, target: Tensor, read: Read) -> Tensor:
    def value(given: Any) -> Any:
        if isinstance(given, tuple):
            return list(map(value, given))
        if not isinstance(given, Assembly):
            return given
        held = target.new_empty(given.shape)
        read_into(held, given, whole_box(given.shape), read)
        return held

    result = allowed.op(made.op)(*map(value, made.args))
    return result if isinstance(result, Tensor) else result[made.index]
