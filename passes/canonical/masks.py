"""Explicit attention masks that say nothing new: provably causal ones become is_causal, provably full ones go away.

A mask made of constants alone (positions, comparisons) is computed here, once, and examined; of a large one, only the
allowed columns of each row are, and the mask itself only if those are unknown: for 131,072 tokens it has 17 billion
elements. Flash attention then needs no mask in memory, and the ops that built it are dead. One that reads a batch
tensor or a parameter stays.

    allowed(i, j)  =  first[i] <= j < stop[i]        causal: 0, i + 1     full: 0, t     a window of w: i + 1 - w, i + 1

A comparison of a column of numbers with a row of them, in order, allows a run in each row; intersections, unions and
complements of runs at an end are runs again. Vectors are computed; all other values are unknown.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from passes.program.builder import prune
from passes.program.known_values import Constants
from passes.program.ops.aten import aten, packet_of, shape_of
from passes.program.ops.groups import ANDS, ORS, SAME, WITH_SIZES
from passes.program.program import Program
from passes.program.source_lines import where_of

LARGE = 1 << 22  # elements: from there on, rows are quicker, and take a thousandth of the memory


def simplify_masks(program: Program) -> None:
    """Rewrite the attention calls of ``program`` in place; ``program.rewrites`` says which and why."""
    meanings: dict[fx.Node, str] = {}
    constants = Constants(program)
    rows = MaskRows(constants)
    for node in program.graph.graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default or len(node.args) < 4:
            continue
        mask = node.args[3]
        if not isinstance(mask, fx.Node) or mask not in constants.nodes or (len(node.args) > 5 and node.args[5]):
            continue
        if mask not in meanings:
            runs = rows.of(mask) if mask.meta["val"].numel() > LARGE else None
            meanings[mask] = _meaning(constants.value(mask)) if runs is None else runs.meaning()
        if meanings[mask]:
            _replace(node, meanings[mask] == "causal")
            program.rewrites.append((f"the attention mask is {meanings[mask]}", where_of(node)))
    if any(meanings.values()):
        prune(program.graph.graph)


def _meaning(mask: torch.Tensor | None) -> str:
    """ "causal", "full" or "" for a boolean or an additive mask [.., s, t]."""
    if mask is None or mask.dim() < 2:
        return ""
    allowed = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((allowed | (mask <= torch.finfo(mask.dtype).min)).all()):
        return ""
    if bool(allowed.all()):
        return "full"
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return "causal" if mask.shape[-1] == mask.shape[-2] and bool((allowed == causal).all()) else ""


def _replace(node: fx.Node, causal: bool) -> None:
    query, key, value, _, *rest = node.args
    dropout = rest[0] if rest else node.kwargs.get("dropout_p", 0.0)
    node.args = (query, key, value, None, dropout, causal)
    node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("dropout_p", "is_causal", "attn_mask")}


MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq"}


@dataclass(frozen=True)
class Runs:
    """For each of ``len(first)`` rows the allowed run of columns, of ``width``; an empty one if none is allowed."""

    first: Tensor
    stop: Tensor
    width: int

    @property
    def is_empty(self) -> Tensor:
        return self.stop <= self.first

    def meaning(self) -> str:
        """ "causal", "full" or ""."""
        if bool(((self.first <= 0) & (self.stop >= self.width)).all()):
            return "full"
        rows = torch.arange(1, len(self.first) + 1)
        is_square = len(self.first) == self.width
        return "causal" if is_square and bool(((self.first <= 0) & (self.stop == rows)).all()) else ""


class MaskRows:
    """Examines constant values [.., s, t]; owns the result for each."""

    def __init__(self, constants: Constants) -> None:
        self.constants = constants
        self._found: dict[fx.Node, Runs | None] = {}

    def of(self, node: Any, size: tuple[int, int] | None = None) -> Runs | None:
        """Return the runs of a boolean value that is alike in all leading dims; None if there are none that are known.
        ``size``: rows and width that it is broadcast to."""
        if not isinstance(node, fx.Node) or (size is None and len(shape_of(node)) < 2):
            return None
        if (vector := self._vector(node)) is not None:
            rows, width = size or shape_of(node)[-2:]
            found = _of_vector(vector, rows, width)
            if found is not None or size is not None:
                return found
        if node not in self._found:
            is_known = node in self.constants.nodes and len(shape_of(node)) > 1
            self._found[node] = self._of_call(node) if is_known else None
        return self._found[node]

    def _of_call(self, node: fx.Node) -> Runs | None:
        x, *rest = node.args
        rows, width = shape_of(node)[-2:]
        op = packet_of(node.target)
        if (op in SAME or op in WITH_SIZES) and isinstance(x, fx.Node):
            return self.of(x) if shape_of(x)[-2:] == (rows, width) else None
        if op in (aten.bitwise_not, aten.logical_not):
            return _turned(self.of(x))
        if op in ANDS or op in ORS:
            return _joined(self.of(x, (rows, width)), self.of(rest[0], (rows, width)), op in ORS)
        name = getattr(op, "__name__", "")
        if name in MIRRORED and rest:
            return self._compared(name, x, rest[0], rows, width)
        if op is aten.tril:
            return _joined(self.of(x), _triangle(rows, width, int(rest[0]) if rest else 0), False)  # pyright: ignore
        if op in (aten.ones, aten.zeros) and node.meta["val"].dtype == torch.bool:
            return _all(rows, width, op is aten.ones)
        if op is aten.full and isinstance(rest[0], bool):
            return _all(rows, width, rest[0])
        return None

    def _vector(self, node: fx.Node) -> Tensor | None:
        """Return [s, 1], [1, t] or [1, 1] of a value that is the same in all leading dims; None for any other."""
        while node.target is aten.expand.default and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        shape = shape_of(node)
        if node not in self.constants.nodes or (len(shape) > 1 and min(shape[-2:]) > 1):
            return None
        value = self.constants.value(node)
        if value is None:
            return None
        value = value.reshape(-1, *((1, 1) if not shape else (1, *shape)[-2:]))
        return value[0] if bool((value == value[0]).all()) else None

    def _compared(self, name: str, left: Any, right: Any, rows: int, width: int) -> Runs | None:
        """column of numbers ~ row of numbers; or the difference of the two ~ a number."""
        if isinstance(left, fx.Node) and left.target is aten.sub.Tensor and not isinstance(right, fx.Node):
            a, b = (self._vector(n) if isinstance(n, fx.Node) else None for n in left.args[:2])
            if a is None or b is None or left.kwargs or a.dtype.is_floating_point:
                return None
            return _compared(name, a, b + right, rows, width)
        a, b = (self._vector(n) if isinstance(n, fx.Node) else torch.tensor([[n]]) for n in (left, right))
        return None if a is None or b is None else _compared(name, a, b, rows, width)


def _of_vector(vector: Tensor, rows: int, width: int) -> Runs | None:
    if vector.dtype != torch.bool:
        return None
    if vector.shape[1] == 1:
        stop = vector[:, 0].long().expand(rows) * width
        return Runs(torch.zeros_like(stop), stop, width)
    (places,) = vector[0].nonzero(as_tuple=True)
    if not len(places):
        return _all(rows, width, False)
    first, stop = int(places[0]), int(places[-1]) + 1
    if stop - first != len(places):
        return None
    return Runs(torch.full((rows,), first), torch.full((rows,), stop), width)


def _all(rows: int, width: int, allowed: bool) -> Runs:
    return Runs(torch.zeros(rows, dtype=torch.int64), torch.full((rows,), width * allowed), width)


def _triangle(rows: int, width: int, diagonal: int) -> Runs:
    stop = (torch.arange(rows) + 1 + diagonal).clamp(0, width)
    return Runs(torch.zeros_like(stop), stop, width)


def _compared(name: str, left: Tensor, right: Tensor, rows: int, width: int) -> Runs | None:
    """``left`` ~ ``right``, one a column and the other a row."""
    if left.shape[0] == 1 and left.shape[1] > 1:
        name, left, right = MIRRORED[name], right, left
    if left.shape[1] != 1 or right.shape[0] != 1 or left.dtype.is_floating_point or right.dtype.is_floating_point:
        return None
    column, row = left[:, 0].expand(rows).contiguous(), right[0].expand(width).contiguous()
    if bool((row[1:] < row[:-1]).any()):
        return None
    below, through = (torch.searchsorted(row, column, right=is_right) for is_right in (False, True))
    zero, end = torch.zeros_like(below), torch.full_like(below, width)
    ends = {"gt": (zero, below), "ge": (zero, through), "lt": (through, end), "le": (below, end)}
    return Runs(*(ends | {"eq": (below, through)})[name], width)


def _joined(a: Runs | None, b: Runs | None, either: bool) -> Runs | None:
    """Return the columns that both allow; or ``either``, if that is a run."""
    if a is None or b is None or (a.width, len(a.first)) != (b.width, len(b.first)):
        return None
    if not either:
        return Runs(torch.maximum(a.first, b.first), torch.minimum(a.stop, b.stop), a.width)
    gap = (a.first > b.stop) | (b.first > a.stop)
    if bool((gap & ~a.is_empty & ~b.is_empty).any()):
        return None
    first, stop = torch.minimum(a.first, b.first), torch.maximum(a.stop, b.stop)
    for is_empty, other in ((a.is_empty, b), (b.is_empty, a)):
        first, stop = torch.where(is_empty, other.first, first), torch.where(is_empty, other.stop, stop)
    return Runs(first, stop, a.width)


def _turned(runs: Runs | None) -> Runs | None:
    """Return the complement, if that is a run: the rest of a row after or before a run at its end."""
    if runs is None:
        return None
    starts, ends = runs.first <= 0, runs.stop >= runs.width
    if not bool((runs.is_empty | starts | ends).all()):
        return None
    zero, end = torch.zeros_like(runs.first), torch.full_like(runs.stop, runs.width)
    first = torch.where(runs.is_empty, zero, torch.where(starts, runs.stop, zero))
    stop = torch.where(runs.is_empty | starts, end, runs.first)
    return Runs(first, stop, runs.width)
