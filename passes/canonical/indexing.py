"""Canonical forms of indexing and of writing into parts: slices, selections of rows, and concatenations.

x[.., [2, 3], ..]                    → slice                       if the index is a constant run
slice_scatter(x, y, dim, a, b)       → cat([x[:a], y, x[b:]])       (of a cat: its operands)
… of every n-th element              → the same along a dim of n of its own
select_scatter, copy                 → the same, or the source itself
repeat                               → a new dim, expanded, merged
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.canonical.emit import Emit, Rewrite, applied, dim_of, reshaped, table, viewed
from passes.canonical.layout import sliced
from passes.program.ops.aten import aten, shape_of


def _index(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One constant run of indices is a slice; one dimension's rows in any other constant order are index_select."""
    x, indices = args[0], args[1]
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    constant = _constant(given[0][1]) if len(given) == 1 else None
    if constant is None or constant.dtype == torch.bool:
        return emit(node.target, args, kwargs, node.meta["val"])
    dim, size = given[0][0], shape_of(x)[given[0][0]]
    rows = [int(i) % size for i in constant.reshape(-1)]
    if rows and rows == list(range(rows[0], rows[0] + len(rows))):
        piece = x if len(rows) == size else applied(emit, aten.slice.Tensor, x, dim, rows[0], rows[-1] + 1)
        return reshaped(emit, piece, node.meta["val"])
    return emit(node.target, args, kwargs, node.meta["val"])


def _constant(node: fx.Node) -> torch.Tensor | None:
    """The value of a small constant, seen through copies of it."""
    while node.target in (aten.clone.default, aten.contiguous.default, aten.detach.default):
        node = node.all_input_nodes[0]
    value = node.meta.get("constant")
    return value if value is not None and 0 < value.numel() <= 4096 and not value.is_meta else None


def _slice_scatter(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, source = args[:2]
    dim = dim_of(args, kwargs, 2)
    size, length = shape_of(x)[dim], shape_of(source)[dim]
    start = kwargs.get("start", args[3] if len(args) > 3 else None) or 0
    step = kwargs.get("step", args[5] if len(args) > 5 else 1)
    start = min(start + size if start < 0 else start, size)
    if step != 1:
        if size % step or length != size // step or start >= step:
            return emit(node.target, args, kwargs, node.meta["val"])
        return _every_nth(emit, x, source, dim, start, step, node.meta["val"])
    return _between(emit, x, source, dim, start, start + length, node.meta["val"])


def _every_nth(emit: Emit, x: fx.Node, source: fx.Node, dim: int, start: int, step: int, val: Any) -> fx.Node:
    """``x`` seen as [.., n/step, step, ..] with row ``start`` of the strides replaced by ``source``."""
    sizes = list(shape_of(source))
    strides = _viewed_back(emit, x, [*sizes[: dim + 1], step, *sizes[dim + 1 :]])
    row = viewed(emit, source, [*sizes[: dim + 1], 1, *sizes[dim + 1 :]])
    return reshaped(emit, _between(emit, strides, row, dim + 1, start, start + 1, strides.meta["val"]), val)


def _viewed_back(emit: Emit, x: fx.Node, shape: list[int]) -> fx.Node:
    """``x.reshape(shape)``; if ``x`` is itself a view of a tensor with that shape, that tensor."""
    seen = x.all_input_nodes[0] if x.target is aten.reshape.default else x
    return seen if shape_of(seen) == tuple(shape) else viewed(emit, x, shape)


def _between(emit: Emit, x: fx.Node, source: fx.Node, dim: int, start: int, end: int, val: Any) -> fx.Node:
    """``x`` with [start, end) of ``dim`` replaced by ``source``."""
    pieces = [*_pieces(emit, x, dim, 0, start), source, *_pieces(emit, x, dim, end, shape_of(x)[dim])]
    return emit(aten.cat.default, (pieces, dim), {}, val) if len(pieces) > 1 else source


def _pieces(emit: Emit, x: fx.Node, dim: int, start: int, end: int) -> list[fx.Node]:
    """[start, end) of ``x``: the operands of its concatenation, if the bounds match; else a slice."""
    if start == end:
        return []
    if x.target is aten.cat.default and x.args[1] == dim:
        found, at = [], 0
        for operand in x.all_input_nodes:
            if start <= at and at + shape_of(operand)[dim] <= end:
                found.append(operand)
            at += shape_of(operand)[dim]
        if sum(shape_of(n)[dim] for n in found) == end - start and _each_once(x):
            return found
    return [sliced(emit, x, dim, start, end)]


def _each_once(cat: fx.Node) -> bool:
    operands: Any = cat.args[0]
    return len(operands) == len(set(operands))


def _select_scatter(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, source = args[:2]
    dim = dim_of(args, kwargs, 2)
    index = int(kwargs.get("index", args[3] if len(args) > 3 else 0)) % shape_of(x)[dim]
    row = reshaped(emit, source, source.meta["val"].unsqueeze(dim))
    return _between(emit, x, row, dim, index, index + 1, node.meta["val"])


def _copy(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The old content of the destination does not matter: the source, cast and broadcast."""
    target, source = args[0].meta["val"], args[1]
    if source.meta["val"].dtype != target.dtype:
        source = applied(emit, aten.to.dtype, source, target.dtype)
    sizes = [int(n) for n in target.shape]
    return source if shape_of(source) == tuple(sizes) else applied(emit, aten.expand.default, source, sizes)


def _repeat(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """[a, b].repeat(r, s) is [1, a, 1, b] expanded to [r, a, s, b], merged; a dim of size 1 is expanded in place."""
    x, times = args[0], [int(n) for n in args[1]]
    shape = [1] * (len(times) - len(shape_of(x))) + list(shape_of(x))
    if all(n == 1 for n in times):
        return viewed(emit, x, shape)
    plain = [r == 1 or n == 1 for r, n in zip(times, shape, strict=True)]
    wide = [d for r, n, p in zip(times, shape, plain, strict=True) for d in ((n,) if p else (1, n))]
    full = [d for r, n, p in zip(times, shape, plain, strict=True) for d in ((r * n,) if p else (r, n))]
    expanded = applied(emit, aten.expand.default, viewed(emit, x, wide), full)
    return reshaped(emit, expanded, node.meta["val"])


INDEXING: dict[Any, Rewrite] = table(
    {
        _index: "index.Tensor",
        _slice_scatter: "slice_scatter",
        _select_scatter: "select_scatter",
        _copy: "copy",
        _repeat: "repeat tile",
    }
)
