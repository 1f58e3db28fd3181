"""Canonical forms of ops that move, split and join elements without computing on them, that index, and that write into
parts.

view, flatten, unsqueeze, squeeze …  → reshape to static sizes
transpose, t, mT, movedim …          → permute
split, chunk, unbind, select         → split_with_sizes / slice, then reshape
stack, cat                           → cat of the operands that are not empty
repeat_interleave, repeat            → a new dim, expanded, merged
to, type_as, _to_copy                → to.dtype, or nothing
x[.., [2, 3], ..]                    → slice                       if the index is a constant run
slice_scatter(x, y, dim, a, b)       → cat([x[:a], y, x[b:]])       (of a cat: its operands)
… of every n-th element              → the same along a dim of n of its own
select_scatter, copy                 → the same, or the source itself
"""

import operator
from typing import Any

import torch
from torch import fx

from passes.canonical.emit import Emit, Rewrite, applied, dim_of, reshaped, table, viewed, viewed_back
from passes.program.ops.aten import aten, permutation, shape_of


def _to_dtype(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    after = node.meta["val"]
    if not isinstance(args[0], fx.Node):  # a number: torch.vmap's ops take it as a tensor
        return emit(aten.full.default, ([], args[0]), {"dtype": after.dtype}, after)
    before = args[0].meta["val"]
    if before.dtype == after.dtype:
        return args[0]
    return emit(aten.to.dtype, (args[0], after.dtype), {}, after)


def _reshape(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    made = reshaped(emit, args[0], node.meta["val"])
    if node.target is aten.unsqueeze.default and made is not args[0]:
        made.meta["unsqueezed"] = int(node.args[1]) % len(shape_of(made))  # pyright: ignore[reportArgumentType]
    return made


def _permute(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    dims = permutation(node.target, args[0].meta["val"].dim(), args[1:], kwargs)
    if dims == sorted(dims):
        return args[0]
    return emit(aten.permute.default, (args[0], dims), {}, node.meta["val"])


def _expand(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    sizes = [int(n) for n in node.meta["val"].shape]
    if tuple(sizes) == shape_of(args[0]):
        return args[0]
    return emit(aten.expand.default, (args[0], sizes), {}, node.meta["val"])


def _split(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    dim = dim_of(args, kwargs, 2)
    sizes = [int(v.shape[dim]) for v in node.meta["val"]]
    return emit(aten.split_with_sizes.default, (args[0], sizes, dim), {}, node.meta["val"])


def _unbind(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    dim = dim_of(args, kwargs, 1)
    pieces = [v.unsqueeze(dim) for v in node.meta["val"]]
    return emit(aten.split_with_sizes.default, (args[0], [1] * len(pieces), dim), {}, pieces)


def _getitem(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Rewrite a piece of a split; that of an unbind still has its dim of size 1, which goes now."""
    source = args[0]
    if not isinstance(source, fx.Node):
        return source[args[1]]
    if source.target is aten.dropout.default:
        return source
    val = source.meta["val"][args[1]]
    piece = emit(operator.getitem, (source, args[1]), {}, val)
    return reshaped(emit, piece, node.meta["val"])


def sliced(emit: Emit, x: fx.Node, dim: int, start: int, end: int) -> fx.Node:
    """Slice [start, end) of ``x``: of the operand of a concatenation that it lies in, and of the source of a slice."""
    args: Any = x.args
    if (start, end) == (0, shape_of(x)[dim]):
        return x
    if x.target is aten.slice.Tensor and len(args) == 4 and args[1] == dim:
        return sliced(emit, args[0], dim, start + args[2], end + args[2])
    at = 0
    for piece in args[0] if x.target is aten.cat.default and args[1] == dim else ():
        stop, same = at + shape_of(piece)[dim], piece.meta["val"].dtype == x.meta["val"].dtype
        if at <= start < end <= stop and same:
            return sliced(emit, piece, dim, start - at, end - at)
        at = stop
    return applied(emit, aten.slice.Tensor, x, dim, start, end)


def _select(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    dim, val = dim_of(args, kwargs, 1), node.meta["val"]
    if isinstance(args[2], fx.Node):  # a tensor of one number, as an index
        index = viewed(emit, args[2], [1])
        return reshaped(emit, applied(emit, aten.index.Tensor, args[0], [*[None] * dim, index]), val)
    size = shape_of(args[0])[dim]
    index = int(args[2]) % size
    selected = reshaped(emit, sliced(emit, args[0], dim, index, index + 1), val)
    if size == 1:
        _mark_whole(args[0], dim)
    if dim == 0:
        selected.meta["selected"] = True  # of size 1, if it looks like a view
    return selected


def _mark_whole(x: fx.Node, dim: int) -> None:
    """Note that a cut is all of a dim: in a capture of one sequence, it may be one of several."""
    x.meta["cut_whole"] = tuple(dict.fromkeys((*x.meta.get("cut_whole", ()), dim)))


def _slice(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Rewrite slice and narrow with plain bounds 0 ≤ start ≤ end ≤ size."""
    x, dim = args[0], dim_of(args, kwargs, 1)
    size, length = shape_of(x)[dim], int(node.meta["val"].shape[dim])
    step = int(args[4]) if len(args) > 4 else int(kwargs.get("step", 1))
    start = args[2] if len(args) > 2 and args[2] is not None else kwargs.get("start", 0) or 0
    given, start = start, min(start + size if start < 0 else start, size)
    if length == size and step == 1:
        stop = args[3] if len(args) > 3 else kwargs.get("end")
        if start != given or (stop is not None and int(stop) <= size):
            _mark_whole(x, dim)
        if dim == 0 and stop is not None and int(stop) <= size:
            x.meta["selected"] = True  # the first n of n
        return x
    end = min(start + (length - 1) * step + 1 if length else start, size)
    if step == 1:
        return sliced(emit, x, dim, start, end)
    return emit(aten.slice.Tensor, (x, dim, start, end, step), {}, node.meta["val"])


def _stack(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    val = node.meta["val"]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % val.dim()
    pieces = [reshaped(emit, x, x.meta["val"].unsqueeze(dim)) for x in args[0]]
    return emit(aten.cat.default, (pieces, dim), {}, val)


def _cat(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Drop empty pieces (the start of a key cache), which may even have fewer dims than the rest."""
    pieces = [x for x in args[0] if x.meta["val"].numel()]
    if len(pieces) == 1 and shape_of(pieces[0]) == tuple(node.meta["val"].shape):
        return pieces[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return emit(node.target, (pieces or args[0], dim), {}, node.meta["val"])


def _repeat_interleave(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Repeat each element ``times`` in a row: a new dim, expanded, merged. Of all dims together if none is named."""
    x, times = args[0], int(args[1])
    is_flat = len(args) < 3 and kwargs.get("dim") is None
    flat = x.meta["val"].flatten() if is_flat else x.meta["val"]
    dim = 0 if is_flat else dim_of(args, kwargs, 2)
    wide = flat.unsqueeze(dim + 1)
    sizes = [times if d == dim + 1 else int(n) for d, n in enumerate(wide.shape)]
    expanded = emit(aten.expand.default, (reshaped(emit, x, wide), sizes), {}, wide.expand(sizes))
    return reshaped(emit, expanded, node.meta["val"])


def _index(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Rewrite one constant run of indices as a slice; one dim's rows in any other constant order are index_select."""
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
    """Return the value of a small constant, seen through copies of it."""
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
        sizes = list(shape_of(source))  # x as [.., n/step, step, ..], with row ``start`` of the strides replaced
        strides = viewed_back(emit, x, [*sizes[: dim + 1], step, *sizes[dim + 1 :]])
        row = viewed(emit, source, [*sizes[: dim + 1], 1, *sizes[dim + 1 :]])
        return reshaped(emit, _between(emit, strides, row, dim + 1, start, strides.meta["val"]), node.meta["val"])
    return _between(emit, x, source, dim, start, node.meta["val"])


def _between(emit: Emit, x: fx.Node, source: fx.Node, dim: int, start: int, val: Any) -> fx.Node:
    """Return ``x`` with ``source`` in the place of as many rows of ``dim``, from ``start`` on."""
    end = start + shape_of(source)[dim]
    pieces = [*_pieces(emit, x, dim, 0, start), source, *_pieces(emit, x, dim, end, shape_of(x)[dim])]
    return emit(aten.cat.default, (pieces, dim), {}, val) if len(pieces) > 1 else source


def _pieces(emit: Emit, x: fx.Node, dim: int, start: int, end: int) -> list[fx.Node]:
    """Return [start, end) of ``x``: the operands of its concatenation, if the bounds match; else a slice."""
    if start == end:
        return []
    if x.target is aten.cat.default and x.args[1] == dim:
        found, at = [], 0
        for operand in x.all_input_nodes:
            if start <= at and at + shape_of(operand)[dim] <= end:
                found.append(operand)
            at += shape_of(operand)[dim]
        is_each_once = len(set(x.args[0])) == len(x.args[0])  # pyright: ignore[reportArgumentType]
        if sum(shape_of(n)[dim] for n in found) == end - start and is_each_once:
            return found
    return [sliced(emit, x, dim, start, end)]


def _select_scatter(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    x, source = args[:2]
    dim = dim_of(args, kwargs, 2)
    index = int(kwargs.get("index", args[3] if len(args) > 3 else 0)) % shape_of(x)[dim]
    row = reshaped(emit, source, source.meta["val"].unsqueeze(dim))
    return _between(emit, x, row, dim, index, node.meta["val"])


def _copy(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return the source, cast and broadcast: the old content of the destination does not matter."""
    target, source = args[0].meta["val"], args[1]
    if source.meta["val"].dtype != target.dtype:
        source = applied(emit, aten.to.dtype, source, target.dtype)
    sizes = [int(n) for n in target.shape]
    return source if shape_of(source) == tuple(sizes) else applied(emit, aten.expand.default, source, sizes)


def _repeat(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """[a, b].repeat(r, s) is [1, a, 1, b] expanded to [r, a, s, b], merged; a dim of size 1 is expanded in place.
    ``tile`` takes fewer numbers than there are dims, for the last of them.
    """
    x, times = args[0], [int(n) for n in args[1]]
    times = [1] * (len(shape_of(x)) - len(times)) + times
    shape = [1] * (len(times) - len(shape_of(x))) + list(shape_of(x))
    if all(n == 1 for n in times):
        return viewed(emit, x, shape)
    plain = [r == 1 or n == 1 for r, n in zip(times, shape, strict=True)]
    wide = [d for r, n, p in zip(times, shape, plain, strict=True) for d in ((n,) if p else (1, n))]
    full = [d for r, n, p in zip(times, shape, plain, strict=True) for d in ((r * n,) if p else (r, n))]
    expanded = applied(emit, aten.expand.default, viewed(emit, x, wide), full)
    return reshaped(emit, expanded, node.meta["val"])


LAYOUT: dict[Any, Rewrite] = table(
    {
        _to_dtype: "to.dtype to.dtype_layout to.device to.other _to_copy type_as to.prim_Device to.prim_dtype",
        _reshape: "view reshape _unsafe_view unsqueeze squeeze squeeze.dim squeeze.dims flatten.using_ints "
        "unflatten.int view_as reshape_as _reshape_alias view_copy ravel",
        _permute: "permute transpose.int t numpy_T mT mH adjoint movedim.int movedim.intlist swapaxes swapdims "
        "moveaxis.int transpose_copy.int",
        _expand: "expand expand_as broadcast_to expand_copy",
        _split: "split.Tensor split.sizes split_with_sizes chunk tensor_split.sections unsafe_split.Tensor "
        "unsafe_chunk",
        _unbind: "unbind.int",
        _select: "select.int",
        _slice: "slice.Tensor narrow",
        _stack: "stack",
        _cat: "cat",
        _repeat_interleave: "repeat_interleave.self_int",
        _index: "index.Tensor",
        _slice_scatter: "slice_scatter",
        _select_scatter: "select_scatter",
        _copy: "copy",
        _repeat: "repeat tile",
    }
) | {operator.getitem: _getitem}
