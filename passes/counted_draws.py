"""Draws that the plan has named become numbers of their elements: the same for every layout.

    dropout(x, p)   →   counted_dropout(x, p, random, place)

``place`` says which elements of the full value this rank has: of tp its slices, of cp its chunks of each sequence.

Needs:   ops of this rank's sizes (passes.localize).
Leaves:  no named draw that reads a stream.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.base import LowerContext
from passes.moe import exchange
from passes.ops.counted import (
    Place,
    Ranges,
    counted_bernoulli,
    counted_dropout,
    counted_normal,
    counted_uniform,
    dropout_of_rows,
    row_names,
)
from passes.partition.sequence import zigzag
from passes.program.ops.aten import aten, named, shape_of
from passes.rng.places import BERNOULLI, KINDS, UNIFORM
from passes.types.draw import Draw
from passes.types.types import Placement

OF_ROWS = (exchange.name_rows, exchange.drop_rows)


def counted(node: fx.Node, context: LowerContext, random: fx.Node) -> fx.Node | None:
    """The call that takes the place of ``node``, of a stage; None if the plan has no names for its numbers."""
    draw: Draw | None = node.meta.get("draw")
    if draw is None:
        return None
    graph = node.graph
    if node.target is exchange.name_rows:
        return graph.call_function(row_names, (random, place_of(draw, node, context), torch.device(context.device)))
    if node.target is exchange.drop_rows:
        rows, p, names = node.args
        place = place_of(draw, node, context, first=len(shape_of(node)) - len(draw.shape))
        return graph.call_function(dropout_of_rows, (rows, p, random, place, names))
    place = place_of(draw, node, context)
    given = named(node)
    if node.target is aten.dropout.default:
        return graph.call_function(counted_dropout, (node.args[0], node.args[1], random, place))
    kind = KINDS[node.target]
    like: Any = given.get("self", given.get("input"))
    if kind == BERNOULLI:
        return graph.call_function(counted_bernoulli, (given.get("p", like), random, place, like))
    value = node.meta["val"]
    function = counted_uniform if kind == UNIFORM else counted_normal
    return graph.call_function(function, (random, place, value.dtype, torch.device(context.device)))


def place_of(draw: Draw, node: fx.Node, context: LowerContext, first: int = 0) -> Place:
    """Which elements of the full microbatch this rank has. ``first``: the dim of ``node`` that is the draw's first."""
    ranges: list[Ranges] = [((0, size),) for size in draw.shape]
    if draw.cut is not None:
        cp = context.axes["cp"]
        ranges[draw.cut.dim] = _chunks(draw.cut, cp.size, cp.rank)
    placement: Placement = node.meta["placement"]
    if placement.is_sharded:
        axis = context.axis_of(node)
        dim = placement.dim - first
        ranges[dim] = _of(ranges[dim], _held(placement, axis.size, axis.rank))
    return Place(draw.site, draw.shape, tuple(ranges), draw.batch, draw.by_sample)


def _held(placement: Placement, tp: int, rank: int) -> Ranges:
    """This rank's ranges of the sharded dim. Padding, a copy of the last element, has that element's numbers."""
    end, found = sum(placement.sizes), []
    for (start, stop), num_data in zip(placement.slices(tp, rank), placement.data_sizes(tp, rank), strict=True):
        found += [(start, start + num_data)] if num_data else []
        found += [(end - 1, end)] * (stop - start - num_data)
    return tuple(found)


def _chunks(cut: Placement, cp: int, rank: int) -> Ranges:
    """The chunks of each of the sequences that are concatenated in a dim."""
    found, start = [], 0
    for segment in cut.segments:
        found += [(start + a, start + b) for a, b in zigzag.rows(segment.size, cp, rank)]
        start += segment.size
    return tuple(found)


def _of(whole: Ranges, parts: Ranges) -> Ranges:
    """``parts``, in their order, of the concatenation of the ranges ``whole``."""
    found = []
    for a, b in parts:
        start = 0
        for first, end in whole:
            low, high = max(a, start), min(b, start + end - first)
            if low < high:
                found.append((first + low - start, first + high - start))
            start += end - first
    return tuple(found)
