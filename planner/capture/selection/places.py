"""Values with selected rows, and their positions: read there and written back, in the dense form with every row.

    x[token]                                  x
    probs[token, choice]                      where(mask, probs, 0).sum(choices)      one choice at most is so
    out.index_add(0, token, y)                out + where(row_mask, y, 0)
    out[token] = y                            where(row_mask, 0, out) + where(row_mask, y, 0)

Rows are one dim, [.., num, ..], in the place of the dim of selected ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from passes.program.ops.aten import aten, named, packet_of, shape_of
from passes.program.ops.groups import LOOKUPS
from planner.capture.data_dependence import calls_in
from planner.capture.model.exchange import tensors_in
from planner.capture.selection.space import SINGULAR, Space, endangered, naming_places


@dataclass(frozen=True)
class Rows:
    """A value with selected rows; ``node``: the same with all rows. ``source``: the value and positions from which the
    rows were read; ``addend``: for a sum, the rows that were added.
    """

    space: Space
    node: fx.Node
    source: tuple[fx.Node, Slots] | None = None
    addend: fx.Node | None = None


@dataclass(frozen=True)
class Positions:
    """The positions of the selected rows along ``dims`` of the mask; with several dims each is a column."""

    space: Space
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Numbers:
    """0, 1 … of the selected rows in turn; ``node``: of all rows."""

    space: Space
    node: fx.Node


COUNT = object()  # the number of selected rows, or a number computed from it


def column_of(value: torch.Tensor) -> int | None:
    """Return the dim of a table of positions that is not the rows."""
    rows = row_dim(value)
    return None if rows is None or value.dim() != 2 else 1 - rows


def columns(node: fx.Node, dims: tuple[int, ...], column: int) -> tuple[int, ...] | list[tuple[int, ...]] | None:
    """Return the columns that a call takes of a table; a list if it makes several tables."""
    packet, given = packet_of(node.target), named(node)
    if packet in (aten.t, aten.transpose, aten.permute, aten.contiguous, aten.clone, aten.detach, aten.alias):
        return dims
    if int(given.get("dim", 0)) % 2 != column or packet not in (aten.select, aten.unbind, aten.split, aten.slice):
        return None
    if packet is aten.select:
        return (dims[int(given["index"])],)
    if packet is aten.slice:
        return tuple(dims[slice(given["start"], given["end"], given["step"])])
    size = 1 if packet is aten.unbind else given.get("split_size")
    return [(d,) for d in dims] if size == 1 else None


def row_dim(value: Any) -> int | None:
    """Return the dim of rows in a tensor: the one dim with a symbol as size."""
    if not isinstance(value, torch.Tensor):
        return next((row_dim(v) for v in value), None) if isinstance(value, (tuple, list)) else None
    found = [d for d, n in enumerate(value.shape) if not isinstance(n, int)]
    is_plain = len(found) == 1 and isinstance(value.shape[found[0]].node.expr, sympy.Symbol)  # pyright: ignore
    return found[0] if is_plain else None


def symbols_of(value: Any) -> set[sympy.Symbol]:
    sizes: list[Any] = [n for tensor in tensors_in(value) for n in tensor.shape]
    return {s for n in sizes if not isinstance(n, int) for s in n.node.expr.free_symbols}


def is_dynamic(module: fx.GraphModule) -> bool:
    """Return whether any shape depends on data, in the graph or in a region of it."""
    return any(symbols_of(call.meta.get("val")) for call in calls_in(module))


class Writer:
    """Owns the graph under construction; each call has the meta of ``origin``, the call that it replaces."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.origin: fx.Node | None = None
        self.last: fx.Node | None = None

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])  # pyright: ignore[reportGeneralTypeIssues]
        return self.emit(target, args, kwargs, target(*values, **named))

    def emit(self, target: Any, args: Any, kwargs: Any, val: Any) -> fx.Node:
        assert self.origin is not None
        node = self.graph.create_node(
            "call_function", target, tuple(args), dict(kwargs), name=f"{self.origin.name}_of_all"
        )
        node.meta = {**self.origin.meta, "val": val}
        self.last = node
        return node

    def shaped(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        return x if shape_of(x) == tuple(shape) else self.call(aten.reshape.default, x, list(shape))

    def permuted(self, x: fx.Node, order: list[int]) -> fx.Node:
        return x if order == sorted(order) else self.call(aten.permute.default, x, order)

    def only_selected(self, space: Space, x: fx.Node, dim: int, other: float = 0) -> fx.Node:
        """Replace rows [.., num, ..] along ``dim`` that are not selected by a number."""
        mask = self.shaped(space.row_mask, [space.num] + [1] * (len(shape_of(x)) - dim - 1))
        return self.call(aten.where.ScalarOther, mask, x, other)

    def kept_regular(
        self, space: Space, call: fx.Node, dense: Mapping[fx.Node, tuple[fx.Node, int]]
    ) -> dict[fx.Node, fx.Node]:
        """Return the operands of a call with unselected rows replaced: by 1 if it is singular, by 0 in integers that
        are indices. ``dense``: all rows of each, and their dim.
        """
        others = dict.fromkeys(endangered(call), 1) if packet_of(call.target) in SINGULAR else {}
        others |= dict.fromkeys(naming_places(call), 0)
        return {n: self.only_selected(space, *dense[n], other) for n, other in others.items() if n in dense}

    def kept_small(self, space: Space, rows: fx.Node, dim: int) -> fx.Node:
        """Zero unselected rows in float16, with so small a range that they may overflow."""
        tensor, origin = rows.meta["val"], self.origin
        is_half = isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float16
        began = origin is None or origin.target in LOOKUPS or packet_of(origin.target) is aten.to
        return self.only_selected(space, rows, dim) if is_half and began else rows

    def read(self, space: Space, x: fx.Node, slots: Slots) -> fx.Node:
        """Return the elements of ``x`` at each row's position."""
        start, covered, shape = slots.dims[0], slots.of_mask, shape_of(x)
        used, before, after = _used(space, covered), shape[:start], shape[slots.dims[-1] + 1 :]
        x = self.permuted(x, [*range(start), *slots.order, *range(slots.dims[-1] + 1, len(shape))])
        x = self.shaped(x, [*before, *(space.shape[d] if d in covered else 1 for d in used), *after])
        gone = [i for i, d in enumerate(used) if d in space.gone]
        if gone:
            x = self.call(aten.where.ScalarOther, self._mask(space, used, len(before), len(after)), x, 0)
            x = self.call(aten.sum.dim_IntList, x, [start + i for i in gone], dtype=x.meta["val"].dtype)
        full = [*before, *(space.shape[d] for d in space.kept), *after]
        if shape_of(x) != tuple(full):
            x = self.call(aten.expand.default, x, full)
        return self.shaped(x, [*before, space.num, *after])

    def added(self, space: Space, out: fx.Node, slots: Slots, rows: fx.Node) -> fx.Node:
        """Return ``out`` with the selected rows added at their positions."""
        start, covered = slots.dims[0], slots.of_mask
        used, after = _used(space, covered), len(shape_of(out)) - slots.dims[-1] - 1
        part = self._arranged(space, out, slots, rows)
        part = self.call(aten.where.ScalarOther, self._mask(space, used, start, after), part, 0)
        lost = [start + i for i, d in enumerate(used) if d not in covered]
        if lost:
            part = self.call(aten.sum.dim_IntList, part, lost)
        return self.call(aten.add.Tensor, out, self._back(slots, part))

    def replaced(self, space: Space, out: fx.Node, slots: Slots, rows: fx.Node) -> fx.Node:
        """Return ``out`` with the selected rows in place of the elements at their positions."""
        start, after = slots.dims[0], len(shape_of(out)) - slots.dims[-1] - 1
        mask = self._mask(space, _used(space, slots.of_mask), start, after)
        part = self._arranged(space, out, slots, rows)
        mask, part = self._back(slots, mask), self._back(slots, part)
        # as a sum, since partial sums over tp stay such, and experts are found by their summands
        kept = self.call(aten.where.ScalarSelf, mask, 0, out)
        return self.call(aten.add.Tensor, kept, self.call(aten.where.ScalarOther, mask, part, 0))

    def _mask(self, space: Space, used: Sequence[int], before: int, after: int) -> fx.Node:
        """Return the mask over ``used`` dims, between dims of size 1."""
        whole = space.mask if set(used) & set(space.gone) else space.row_mask
        return self.shaped(whole, [1] * before + [space.shape[d] for d in used] + [1] * after)

    def _arranged(self, space: Space, out: fx.Node, slots: Slots, rows: fx.Node) -> fx.Node:
        """Reshape rows to the dims of the mask that are used, in the order of the mask."""
        shape = shape_of(out)
        before, after = shape[: slots.dims[0]], shape[slots.dims[-1] + 1 :]
        full = [*before, space.num, *after]
        if shape_of(rows) != tuple(full):
            rows = self.call(aten.expand.default, rows, full)
        sizes = [space.shape[d] if d in space.kept else 1 for d in _used(space, slots.of_mask)]
        return self.shaped(rows, [*before, *sizes, *after])

    def _back(self, slots: Slots, part: fx.Node) -> fx.Node:
        """Permute the mask's dims to the order of the dims written to."""
        start, end = slots.dims[0], slots.dims[-1] + 1
        place = {d: start + i for i, d in enumerate(slots.order)}
        return self.permuted(part, [*range(start), *(place[d] for d in slots.dims), *range(end, len(shape_of(part)))])


@dataclass(frozen=True)
class Slots:
    """Pairs (dim of a tensor, dim of a mask) that run along each other."""

    pairs: tuple[tuple[int, int], ...]

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(sorted(d for d, _ in self.pairs))

    @property
    def of_mask(self) -> tuple[int, ...]:
        return tuple(sorted(m for _, m in self.pairs))

    @property
    def order(self) -> list[int]:
        """Return the dims of the tensor in the order of the mask's."""
        return [d for d, _ in sorted(self.pairs, key=lambda pair: pair[1])]

    def fit(self, x: fx.Node, space: Space) -> bool:
        """Return whether the dims are adjacent, each occurs once, and sizes equal the mask's."""
        side_by_side = self.dims == tuple(range(self.dims[0], self.dims[0] + len(self.dims)))
        once = len(set(self.of_mask)) == len(self.pairs)
        return side_by_side and once and all(shape_of(x)[d] == space.shape[m] for d, m in self.pairs)


def runs_along(node: fx.Node, index: fx.Node, dim: int) -> bool:
    """Return whether an index of gather or scatter is the same for all dims but the rows', and covers these fully."""
    shape, whole = index.meta["val"].shape, named(node)["self"].meta["val"].shape
    if packet_of(node.target) in (aten.index_select, aten.index_add, aten.index_copy):
        return len(shape) == 1
    same = all(shape[d] == whole[d] for d in range(len(shape)) if d != dim)
    return len(shape) == len(whole) and row_dim(index.meta["val"]) == dim and same


def summed(node: fx.Node, rows: Rows, env: Mapping[fx.Node, Any]) -> Rows:
    """Note the addend of a sum with rows of a value, as the sum may be written back to that value."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return rows
    made = [env[n] if isinstance(n, fx.Node) else None for n in node.args]
    for read_before, other in (made, made[::-1]):
        if isinstance(read_before, Rows) and read_before.source is not None and isinstance(other, Rows):
            parts = {n.meta["val"].dtype for n in (read_before.node, other.node, rows.node)}
            return Rows(rows.space, rows.node, read_before.source, other.node) if len(parts) == 1 else rows
    return rows


def unspread(call: fx.Node, env: Mapping[fx.Node, Any]) -> tuple[Any, ...] | None:
    """Return the tensors given to ``broadcast_tensors`` if their sizes are equal. ``env``: their new values."""
    read: Any = call.args[0] if packet_of(call.target) is aten.broadcast_tensors else []
    return tuple(env[n] for n in read) if len({str(n.meta["val"].shape) for n in read}) == 1 else None


def picks_of_each(node: fx.Node, env: Mapping[fx.Node, Any]) -> bool:
    """Return whether a call reads its own elements of each of n selected rows: x[arange(n), y]."""
    if packet_of(node.target) is not aten.index:
        return False
    x, indices = named(node)["self"], named(node)["indices"]
    rows, first = env[x], env.get(indices[0])
    if not (isinstance(rows, Rows) and isinstance(first, Numbers) and rows.space is first.space):
        return False
    return row_dim(x.meta["val"]) == 0 and all(n is not None and n.meta["val"].dim() == 1 for n in indices)


def adds_to(node: fx.Node) -> bool | None:
    """Return whether a write adds to the old content; None for other writes."""
    packet, given = packet_of(node.target), named(node)
    if packet is aten.scatter_reduce:
        return True if given["reduce"] == "sum" and given["include_self"] else None
    if packet is aten.scatter and given.get("reduce") is not None:
        return None
    return packet in (aten.index_add, aten.scatter_add) or bool(given.get("accumulate", False))


def _used(space: Space, covered: Sequence[int]) -> list[int]:
    """Return the dims of the mask that a read or a write concerns."""
    return [d for d in range(len(space.shape)) if d in space.kept or d in covered]
