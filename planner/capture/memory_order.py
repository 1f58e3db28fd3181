"""Replace calls that name places in memory by views of the tensor: shards of a tensor have other places.

    x.as_strided(sizes, strides)    →  slice, unflatten, unfold, diagonal, permute, expand of x
    x.set_(y), x.resize_(sizes) …   →  y, and a part of x, if nothing reads the old x

In a capture strides and offsets are known. An axis is a dim of x, or several dims that are one row in memory; each dim
of the result moves along axes by a number of steps. Axes are joined only if a move passes the end of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._functorch import is_batchedtensor

from passes.errors import PlanError
from passes.program.ops.aten import arguments, aten, is_mutable
from passes.program.ops.groups import Ops
from passes.program.source_lines import where_of
from planner.capture.functional import viewed

OF_MEMORY = Ops(
    "as_strided as_strided_ as_strided_copy as_strided_scatter _reshape_alias set_ resize_ resize_as_ is_set_to"
)
Views = tuple[tuple[Any, tuple[Any, ...]], ...]  # ops, each with its arguments after the tensor
FIX = "write this part with slices, reshape, unfold, diagonal, or an index (`x[:, rows]`)"


def views_for_memory(module: fx.GraphModule) -> None:
    """Rewrite each call of ``module`` that names places in memory. Raises PlanError if one is no view of a tensor."""
    for node in [n for n in module.graph.nodes if n.target in OF_MEMORY]:
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(_rewritten(node), propagate_meta=False)
        module.graph.erase_node(node)


def _rewritten(node: fx.Node) -> fx.Node:
    given = arguments(node)
    x = given["self"]
    if node.target in (aten.as_strided_scatter.default, aten.is_set_to.default):
        raise _refused(node, "is not supported")
    if is_batchedtensor(x.meta["val"]):
        raise _refused(node, "is not supported within torch.vmap")
    if is_mutable(node.target) and (x.op == "placeholder" or any(n > node for n in x.users)):
        raise _refused(node, "changes the memory of a tensor that is read later")
    asked = Layout.asked(given, x) if "stride" in given else Layout.of(node.meta["val"])
    return _seen_as(node, given.get("source", x), asked)


@dataclass(frozen=True)
class Layout:
    """The places of a tensor's elements in memory."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        return cls(tuple(map(int, x.shape)), tuple(map(int, x.stride())), int(x.storage_offset()))

    @classmethod
    def asked(cls, given: dict[str, Any], x: fx.Node) -> Layout:
        start = given.get("storage_offset")
        start = x.meta["val"].storage_offset() if start is None else start
        return cls(tuple(map(int, given["size"])), tuple(map(int, given["stride"])), int(start))

    @property
    def end(self) -> int:
        return self.start + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True)) + 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._moves == other._moves

    @property
    def _moves(self) -> tuple[Any, ...]:
        """The layout without the strides of dims of one element, which have no meaning."""
        return self.sizes, self.start, [s for n, s in zip(self.sizes, self.strides, strict=True) if n != 1]

    def holds(self, other: Layout) -> bool:
        """Return whether this layout has every place of ``other``."""
        places = torch.zeros(max(self.end, other.end), dtype=torch.bool)
        places.as_strided(self.sizes, self.strides, self.start).fill_(True)
        return bool(places.as_strided(other.sizes, other.strides, other.start).all())


def _seen_as(node: fx.Node, x: fx.Node, asked: Layout) -> fx.Node:
    """Return ``x``, or the tensor of which it is a view, in the layout ``asked``; ``x`` must hold all of it."""
    own, stops = Layout.of(x.meta["val"]), False
    for base in _owners(x):
        between = takewhile(lambda owner, base=base: owner is not base, _owners(x))
        stops |= any(n.target is aten.detach.default for n in between)
        views = views_of(base.meta["val"], asked)
        if views is not None:
            if base is not x and not own.holds(asked):
                raise _refused(node, "reads memory beyond its operand, for which autograd has no gradient")
            return seen_through(base, (*views, *([(aten.detach.default, ())] if stops else [])), node.meta)
    shown = f"size {list(asked.sizes)}, stride {list(asked.strides)}, of {list(own.sizes)} with {list(own.strides)}"
    raise _refused(node, f"reads memory in an order that is no view of a tensor: {shown}")


def _owners(x: fx.Node) -> Iterator[fx.Node]:
    """Yield ``x``, the tensor of which it is a view, and so on."""
    yield x
    while (source := _source(x)) is not None:
        yield (x := source)


def _source(x: fx.Node) -> fx.Node | None:
    source = viewed(x)
    return source if source is not None and source.meta["val"].dtype == x.meta["val"].dtype else None


def views_of(whole: Tensor, asked: Layout) -> Views | None:
    """Return the views by which ``whole`` gets the layout ``asked``; None if there are none."""
    row = _Row(whole)
    is_seen = Layout.of(whole) == asked or (0 not in asked.sizes and row.move(asked))
    return tuple(row.made) if is_seen else None


def seen_through(x: fx.Node, views: Iterable[tuple[Any, tuple[Any, ...]]], meta: Mapping[str, Any]) -> fx.Node:
    """Insert calls that make ``views`` of ``x``, and return the last one. ``meta``: of each call, without its value."""
    for target, args in views:
        val = target(x.meta["val"], *args)
        x = x.graph.call_function(target, (x, *args))
        x.meta = {**meta, "val": val}
    return x


@dataclass
class _Axis:
    """Adjacent dims of a tensor that are one row in memory, the outermost first."""

    size: int
    stride: int


@dataclass
class _Move:
    """Dim ``dim`` of the result: ``size`` elements, ``step`` apart along an axis."""

    dim: int
    size: int
    step: int


class _Row:
    """Views of a tensor, one of the other; ``at``: the last. ``names``: the dim of the result for each of its dims."""

    def __init__(self, at: Tensor) -> None:
        self.at, self.names, self.made = at, list[int](), list[tuple[Any, tuple[Any, ...]]]()

    def add(self, target: Any, *args: Any) -> None:
        self.at = target(self.at, *args)
        self.made.append((target, args))

    @property
    def shape(self) -> list[int]:
        return [int(n) for n in self.at.shape]

    def move(self, asked: Layout) -> bool:
        """Return whether the layout is reached; the strides of the views prove it."""
        given = Layout.of(self.at)
        axes, order = _axes(given)
        found = _along(axes, asked, asked.start - given.start) if axes is not None else None
        if found is None:
            return False
        axes, starts, moves = found
        self._as_axes(axes, order)
        for axis, start in reversed(list(enumerate(starts))):
            self._open(axis, start, moves[axis])
        self._diagonals()
        self._arrange(asked)
        return Layout.of(self.at) == asked

    def _as_axes(self, axes: list[_Axis], order: list[int]) -> None:
        for dim in sorted(set(range(len(self.shape))) - set(order), reverse=True):
            self.add(aten.select.int, dim, 0)
            order = [d - (d > dim) for d in order]
        self._permute(order)
        self._view([axis.size for axis in axes])
        self.names = [-1] * len(axes)

    def _open(self, at: int, start: int, moves: list[_Move]) -> None:
        """Replace dim ``at`` by a dim for each move along it, the longest step first."""
        names = self.names
        if not moves:
            self.add(aten.select.int, at, start)
            names.pop(at)
        for position, move in enumerate(moves):
            rest = 1 + sum(m.step * (m.size - 1) for m in moves[position + 1 :])
            names[at] = move.dim
            if position == len(moves) - 1:
                self._slice(at, start, (move.size - 1) * move.step + 1, move.step)
            elif rest <= move.step and start + move.size * move.step <= self.shape[at]:
                self._slice(at, start, move.size * move.step)
                self.add(aten.unflatten.int, at, [move.size, move.step])
                names.insert(at := at + 1, -1)
            else:
                self._slice(at, start, (move.size - 1) * move.step + rest)
                self.add(aten.unfold.default, at, rest, move.step)
                names.append(-1)
                at = len(names) - 1
            start = 0

    def _diagonals(self) -> None:
        while (twice := next((n for n in self.names if self.names.count(n) > 1), None)) is not None:
            first, second, *_ = [i for i, n in enumerate(self.names) if n == twice]
            self.add(aten.diagonal.default, 0, first, second)
            self.names = [n for i, n in enumerate(self.names) if i not in (first, second)] + [twice]

    def _arrange(self, asked: Layout) -> None:
        self._permute(sorted(range(len(self.names)), key=lambda i: self.names[i]))
        self._view([n if d in self.names else 1 for d, n in enumerate(asked.sizes)])
        if self.shape != list(asked.sizes):
            self.add(aten.expand.default, list(asked.sizes))

    def _permute(self, order: list[int]) -> None:
        if order != sorted(order):
            self.add(aten.permute.default, order)

    def _view(self, sizes: list[int]) -> None:
        if self.shape != sizes:
            self.add(aten.view.default, sizes)

    def _slice(self, dim: int, start: int, length: int, step: int = 1) -> None:
        if (start, length, step) != (0, self.shape[dim], 1):
            self.add(aten.slice.Tensor, dim, start, start + length, step)


def _axes(given: Layout) -> tuple[list[_Axis] | None, list[int]]:
    """Return the dims by their strides, largest first; None if elements share memory otherwise than by an expanded dim.

    A dim of one element is omitted if it does not fit between the others.
    """
    dims = [d for d, n in enumerate(given.sizes) if n > 1 and given.strides[d]]
    dims.sort(key=lambda d: -given.strides[d])
    if not all(map(_fits(given), dims, dims[1:])):
        return None, []
    for dim in (d for d, n in enumerate(given.sizes) if n == 1):
        at = sum(given.strides[d] >= given.strides[dim] for d in dims)
        wider = [*dims[:at], dim, *dims[at:]]
        dims = wider if all(map(_fits(given), wider, wider[1:])) else dims
    return [_Axis(given.sizes[d], given.strides[d]) for d in dims], dims


def _fits(given: Layout) -> Callable[[int, int], bool]:
    return lambda outer, inner: given.strides[outer] >= given.sizes[inner] * given.strides[inner] > 0


def _along(axes: list[_Axis], asked: Layout, start: int) -> tuple[list[_Axis], list[int], list[list[_Move]]] | None:
    """Return the axes, and the start and the moves of the result along each; axes that a move leaves are joined."""
    axes = list(axes)
    while start >= 0:
        starts, moves = _steps(axes, start), _moves(axes, asked)
        if starts is None or moves is None:
            return None
        ends = [s + sum(m.step * (m.size - 1) for m in along) for s, along in zip(starts, moves, strict=True)]
        left = next((i for i in reversed(range(len(axes))) if ends[i] >= axes[i].size), None)
        if left is None:
            return axes, starts, moves
        outer, inner = axes[left - 1], axes[left]
        if left == 0 or outer.stride != inner.size * inner.stride:
            return None
        axes[left - 1 : left + 1] = [_Axis(outer.size * inner.size, inner.stride)]
    return None


def _steps(axes: Sequence[_Axis], distance: int) -> list[int] | None:
    """Return ``distance`` in memory as steps along the axes; None if it ends between elements."""
    steps = list[int]()
    for axis in axes:
        step, distance = divmod(distance, axis.stride)
        steps.append(step)
    return steps if distance == 0 else None


def _moves(axes: Sequence[_Axis], asked: Layout) -> list[list[_Move]] | None:
    """Return, for each axis, the dims of the result that move along it, the longest steps first.

    A dim of one element takes an axis of one element with its stride, so that it remains the same dim.
    """
    moves: list[list[_Move]] = [[] for _ in axes]
    for dim, (size, stride) in enumerate(zip(asked.sizes, asked.strides, strict=True)):
        single = [i for i, a in enumerate(axes) if (a.size, a.stride) == (1, stride) and not moves[i]]
        if size == 1 and single:
            moves[single[0]].append(_Move(dim, 1, 1))
        steps = _steps(axes, stride) if size > 1 else []
        if steps is None:
            return None
        for along, step in zip(moves, steps, strict=False):
            if step:
                along.append(_Move(dim, size, step))
    for along in moves:
        along.sort(key=lambda m: -m.step)
    return moves


def _refused(node: fx.Node, what: str) -> PlanError:
    name = node.target._opname  # pyright: ignore
    return PlanError(f"{name} {what}", where=where_of(node), fix=FIX)
