"""Carry a cut through a reshape: the result for (segments of) a dim when dims merge or split.

A uniform cut is ``outer`` runs of ``size·inner`` elements, with each run's ``size`` split over tp: [3·h] in three
segments is outer 3; seen as [.., 3, heads, d] the run of one segment is heads·d, and the cut falls on heads. Uneven or
partly replicated segments can only be scaled: [hq + hk + hv] seen as [heads_q + heads_k + heads_v, d].
"""

from __future__ import annotations

from math import prod

from planner.placement.types import Placement, Segment


def reshape_cut(cut: Placement, shape: tuple[int, ...], new_shape: tuple[int, ...], tp: int) -> Placement | None:
    """The cut of ``x.reshape(new_shape)`` when ``x`` of ``shape`` is cut as ``cut``; None if it does not survive."""
    group = _group_of(cut.dim, shape, new_shape)
    if group is None:
        return None
    before, after = group
    if len(before) == len(after) == 1:
        return cut.moved(after[0])
    if cut.padding:
        return None
    prefix = prod(shape[d] for d in before if d < cut.dim)
    suffix = prod(shape[d] for d in before if d > cut.dim)
    if len(set(cut.segments)) == 1 and cut.segments[0].sharded:
        return _uniform(prefix * len(cut.segments), cut.segments[0].size * suffix, after, new_shape, tp)
    return _scaled(cut.segments, suffix, after, new_shape, tp) if prefix == 1 else None


def _group_of(dim: int, shape: tuple[int, ...], new_shape: tuple[int, ...]) -> tuple[list[int], list[int]] | None:
    """The smallest runs of dims (size 1 left out) around ``dim`` that hold the same elements before and after."""
    old = [d for d, n in enumerate(shape) if n != 1]
    new = [d for d, n in enumerate(new_shape) if n != 1]
    while old and new:
        left, right = [old.pop(0)], [new.pop(0)]
        a, b = shape[left[0]], new_shape[right[0]]
        while a != b:
            if a < b and old:
                left.append(old.pop(0))
                a *= shape[left[-1]]
            elif b < a and new:
                right.append(new.pop(0))
                b *= new_shape[right[-1]]
            else:
                return None
        if dim in left:
            return left, right
    return None


def _uniform(outer: int, run: int, dims: list[int], shape: tuple[int, ...], tp: int) -> Placement | None:
    """Place ``outer`` runs of ``run`` elements, each cut in tp, on the one of ``dims`` that keeps parts contiguous."""
    found = None
    prefix = 1
    for position, dim in enumerate(dims):
        inner = prod(shape[d] for d in dims[position + 1 :])
        if outer % prefix == 0 and run % inner == 0:
            count, size = outer // prefix, run // inner
            if count * size == shape[dim] and size % tp == 0:
                found = Placement("V", dim, (Segment(size),) * count)
        prefix *= shape[dim]
    return found


def _scaled(
    segments: tuple[Segment, ...], suffix: int, dims: list[int], shape: tuple[int, ...], tp: int
) -> Placement | None:
    """Uneven segments keep to the first dim of the group, counted in larger or smaller elements."""
    inner = prod(shape[d] for d in dims[1:])
    sizes = [s.size * suffix for s in segments]
    if any(n % inner for n in sizes):
        return None
    scaled = tuple(Segment(n // inner, s.sharded) for n, s in zip(sizes, segments, strict=True))
    if any(s.sharded and s.size % tp for s in scaled):
        return None
    return Placement("V", dims[0], scaled)
