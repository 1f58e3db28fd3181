"""One tensor as a rectangle, with its cut over the ranks: dim 0 downwards, the last dim to the right.

Parts have the number and the colour of their rank; a replicated tensor is one hatched piece. A stack of experts is
drawn as sharded downwards over ep, and experts that are tensors of their own are a row of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt

from planner.mesh import Mesh
from planner.report.page.palette import colour
from planner.sharding.parameters import ParameterPlan

WIDTH, HIGHEST, FLAT = 112, 56, 14  # pixels: of every drawing, the highest, that of a vector
MOST_PARTS = 32  # along one side; of more the first ones are drawn
MOST_CELLS = 16
_DIGIT, _BETWEEN = 6, 3  # pixels: of a digit, between segments


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle: ``rank`` of its axis holds it, -1: each does. ``text`` if it fits."""

    x: float
    y: float
    width: float
    height: float
    rank: int
    text: str = ""

    @property
    def colour(self) -> int:
        return colour(self.rank)

    @property
    def is_thin(self) -> bool:
        """Whether an edge would hide it."""
        return min(self.width, self.height) < 5


@dataclass(frozen=True, slots=True)
class Drawing:
    """``words``: the same as text, for readers that cannot see it."""

    height: float
    parts: tuple[Part, ...]
    words: str
    width: int = WIDTH


Span = tuple[float, float, int]  # begin, length, owner


def draw(p: ParameterPlan, mesh: Mesh, numbers: Sequence[int] = ()) -> Drawing:
    """``numbers``: of the experts, if the row is of experts that are tensors of their own."""
    if p.num_experts and p.expert_number >= 0:
        return _cells(sorted(set(numbers)) or [p.expert_number], p, mesh)
    height = _height(p.shape)
    down, right = [(0.0, height, -1)], [(0.0, float(WIDTH), -1)]
    words = []
    if p.expert_dim >= 0 and mesh.ep > 1:
        down = _spans([(0.0, height, True)], mesh.ep)
        words.append(f"dim {p.expert_dim} over ep {mesh.ep}")
    if p.dim is not None and mesh.size(p.axis) > 1:
        is_right = p.expert_dim >= 0 or p.dim == len(p.shape) - 1
        spans = _spans(_segments(p, WIDTH if is_right else height), mesh.size(p.axis))
        right, down = (spans, down) if is_right else (right, spans)
        words.append(f"dim {p.dim} over {p.axis} {mesh.size(p.axis)}")
    parts = tuple(_part(x, y, w, h, column, row) for y, h, row in down for x, w, column in right)
    return Drawing(height, parts, ", ".join(words) or "replicated")


def _height(shape: Sequence[int]) -> float:
    if len(shape) < 2:
        return FLAT
    rows, columns = (shape[0], prod(shape[1:])) if len(shape) < 3 else (shape[0] * shape[1], prod(shape[2:]))
    return round(min(HIGHEST, max(20, 40 * sqrt(rows / max(columns, 1)))))


def _segments(p: ParameterPlan, length: float) -> list[tuple[float, float, bool]]:
    """(start, length, whether it is cut) of each segment of the dim that is cut."""
    total, start, found = max(sum(p.segments), 1), 0.0, []
    for index, size in enumerate(p.segments):
        found.append((start, size / total * length, index not in p.whole_segments))
        start += size / total * length
    return found


def _spans(segments: Sequence[tuple[float, float, bool]], ranks: int) -> list[Span]:
    """Each sharded segment, split by itself; of very many parts the last one represents all that are not drawn."""
    spans: list[Span] = []
    shown = max(2, MOST_PARTS // len(segments))
    for start, length, is_cut in segments[:MOST_PARTS]:
        length -= _BETWEEN * (len(segments) > 1 and length > 3 * _BETWEEN)
        count = min(ranks, shown) if is_cut else 1
        spans += [(start + i * length / count, length / count, i if is_cut else -1) for i in range(count)]
    return spans


def _part(x: float, y: float, width: float, height: float, column: int, row: int) -> Part:
    rank = column if row < 0 else row
    text = "all" if rank < 0 else f"{row}·{column}" if row >= 0 and column >= 0 else str(rank)
    fits = width >= _DIGIT * len(text) + 3 and height >= 12
    return Part(round(x, 2), round(y, 2), round(width, 2), round(height, 2), rank, text if fits else "")


def _cells(numbers: Sequence[int], p: ParameterPlan, mesh: Mesh) -> Drawing:
    """A cell for each expert in the colour of its ep rank; of many, a cell for each ep rank."""
    of_rank = max(1, p.num_experts // mesh.ep)
    owners = [(str(n), n // of_rank) for n in numbers]
    if len(owners) > MOST_CELLS:
        ranks = sorted({owner for _, owner in owners})[:MOST_PARTS]
        owners = [(f"ep {rank}", rank) for rank in ranks]
    width = WIDTH / len(owners)
    parts = tuple(
        Part(round(i * width, 2), 0, round(width, 2), 24, rank, text if width >= _DIGIT * len(text) + 3 else "")
        for i, (text, rank) in enumerate(owners)
    )
    first, last = numbers[0], numbers[-1]
    which = f"expert {first}" if first == last else f"experts {first} to {last}"
    return Drawing(24, parts, f"{which} of {p.num_experts}, {of_rank} on each of {mesh.ep} ep ranks")
