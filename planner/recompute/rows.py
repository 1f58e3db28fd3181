"""The rows of recomputation: each call of each rerun, the memory that it restores, and its cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from passes.blocks.places import Places
from passes.errors import require
from passes.pieces import AgainCall, Piece
from planner.decisions import Decisions
from planner.recompute.asked import FULL, SELECTIVE


@dataclass(frozen=True, slots=True)
class RecomputeRow:
    """``ops`` of one line run again in the backward of ``block``, on each rank of ``stage``, once a microbatch.

    ``bytes``: of the freed memory that they restore (0: intermediate values). ``flops``: of products; ``moved``:
    bytes that they read and write. ``where``: the user's module and line.
    """

    block: str
    stage: int
    kind: str
    where: str
    ops: str
    bytes: int
    flops: int
    moved: int

    def __post_init__(self) -> None:
        require(self.kind in (FULL, SELECTIVE), f"{self.block} is recomputed in the unknown way {self.kind}")
        require(min(self.bytes, self.flops, self.moved) >= 0, f"{self.ops} of {self.block} has a negative size")


def rows_of(pieces: Sequence[Piece], decisions: Decisions, places: Places) -> tuple[RecomputeRow, ...]:
    """A row for each line of each piece with a recomputed op, in the order of its first op."""
    return tuple(row for piece in pieces for row in _rows(piece, decisions, places))


def _rows(piece: Piece, decisions: Decisions, places: Places) -> Iterator[RecomputeRow]:
    lines: dict[str, list[AgainCall]] = {}
    for call in piece.again:
        if call.bytes or call.flops or call.moved or (call.changed is not None and call.changed.how.forward):
            lines.setdefault(places.text(decisions.program.node(call.name)), []).append(call)
    for place, calls in lines.items():
        ops = ", ".join(_name(call, decisions) for call in calls)
        given, flops, moved = (sum(getattr(call, key) for call in calls) for key in ("bytes", "flops", "moved"))
        yield RecomputeRow(piece.block, piece.stage, piece.kind, place, ops, given, flops, moved)


def _name(call: AgainCall, decisions: Decisions) -> str:
    if call.changed is not None:
        return call.changed.how.name
    target = decisions.program.node(call.name).target
    return str(getattr(target, "__name__", target)).partition(".")[0]
