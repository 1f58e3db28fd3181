"""The kind of a value while rows are selected: rows, their positions, or their count; by the symbol in its shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from passes.program.ops.aten import aten, named, packet_of
from planner.capture.selection.places import Slots
from planner.capture.selection.space import Space


@dataclass(frozen=True)
class Rows:
    """A value with selected rows, and ``node``, the same with all rows. ``source``: the value and positions from which
    the rows were read; ``addend``: for a sum, the rows that were added.
    """

    space: Space
    node: fx.Node
    source: tuple[fx.Node, Slots] | None = None
    addend: fx.Node | None = None


@dataclass(frozen=True)
class Positions:
    """The positions of the selected rows along ``dims`` of the mask; of several dims each is a column."""

    space: Space
    dims: tuple[int, ...]


class _Count:
    """The number of selected rows, or a number computed from it."""


COUNT = _Count()


def column_of(value: torch.Tensor) -> int | None:
    """Of a table of positions the dim that is not the rows."""
    rows = row_dim(value)
    return None if rows is None or value.dim() != 2 else 1 - rows


def columns(node: fx.Node, dims: tuple[int, ...], column: int) -> tuple[int, ...] | list[tuple[int, ...]] | None:
    """The columns that a call takes of a table; several tables if it makes several."""
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
    """The dim of rows in a tensor: the one dim with a symbol as size."""
    if not isinstance(value, torch.Tensor):
        return next((row_dim(v) for v in value), None) if isinstance(value, (tuple, list)) else None
    found = [d for d, n in enumerate(value.shape) if not isinstance(n, int)]
    is_plain = len(found) == 1 and isinstance(value.shape[found[0]].node.expr, sympy.Symbol)  # pyright: ignore
    return found[0] if is_plain else None


def tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(v, torch.Tensor)]


def symbols_of(value: Any) -> set[sympy.Symbol]:
    """Symbols in the shapes of a value."""
    sizes: list[Any] = [n for tensor in tensors(value) for n in tensor.shape]
    return {s for n in sizes if not isinstance(n, int) for s in n.node.expr.free_symbols}
