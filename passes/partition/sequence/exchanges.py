"""Conversions over cp: a value in one type becomes the same value in another.

    cut → whole      gather_sequence         whole → cut        local_rows
    P → whole        sum_over_ranks          whole → P          its share, x / cp

A dim may be several sequences behind each other; each of them is cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.moe.domain import COPIED
from passes.program.ops.aten import aten, shape_of
from passes.program.ops.sequence import gather_sequence, local_rows, sum_over_ranks
from passes.types.types import P, Placement


def converted(value: fx.Node, before: Placement, after: Placement, cp: int) -> fx.Node:
    """Calls at the place where the graph inserts; the last of them has the value in whole size, and its new type."""
    if before.is_sharded:
        made = _along(value, before, gather_sequence, cp, before.local_shape(shape_of(value), cp), shape_of(value))
    elif after.is_sharded:
        made = _along(value, after, local_rows, cp, shape_of(value), after.local_shape(shape_of(value), cp))
    elif before == P:
        made = value.graph.call_function(sum_over_ranks, (value, cp))
    else:
        made = value.graph.call_function(aten.mul.Tensor, (value, 1 / cp))
    made.meta = {key: value.meta[key] for key in (*COPIED, "val", "grad") if key in value.meta}
    made.meta["placement"] = after
    return made


def _along(
    value: fx.Node, cut: Placement, function: Any, cp: int, before: tuple[int, ...], after: tuple[int, ...]
) -> fx.Node:
    """A collective along the sequence, from local shape ``before`` to ``after``."""
    graph, dim, count = value.graph, cut.dim, len(cut.segments)
    if count == 1:
        return graph.call_function(function, (value, dim, cp))
    assert len(set(cut.segments)) == 1, "sequences of several lengths in one dim"
    apart, moved = ((*s[:dim], count, s[dim] // count, *s[dim + 1 :]) for s in (before, after))
    rows = _with_value(graph.call_function(aten.reshape.default, (value, list(apart))), value, apart)
    made = _with_value(graph.call_function(function, (rows, dim + 1, cp)), value, moved)
    return graph.call_function(aten.reshape.default, (made, list(after)))


def resized(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A meta value of that dtype in another shape."""
    return torch.empty(shape, dtype=value.dtype, device="meta")


def _with_value(node: fx.Node, like: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    node.meta = {key: like.meta[key] for key in COPIED if key in like.meta}
    node.meta |= {"val": resized(like.meta["val"], shape), "grad": like.meta["grad"]}
    return node
