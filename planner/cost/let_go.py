"""What blocks that are computed again let go, as calls and memory of a stage's trace.

forward     what is let go lives until the end of the block
between     only what the rerun begins with is held, and what autograd keeps beside it
backward    before the first call that reads of it, all of the block is there again; it goes with its last reader
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.recompute.pieces import Piece
from planner.saved.trace import Call, StageTrace


@dataclass(frozen=True, slots=True)
class LetGo:
    """Of one block. ``end``: the number of its last call. ``reads``: of the last call whose backward reads what is let
    go. ``memory`` that is let go, and ``inside`` of which calls hidden tensors are; ``sources`` are held for the rerun.
    ``again``: numbers of the calls of the rerun.
    """

    end: int
    reads: int
    memory: frozenset[int]
    sources: frozenset[int]
    inside: frozenset[int]
    again: tuple[int, ...]

    def bytes(self, trace: StageTrace) -> int:
        return sum(trace.bytes_of[m] for m in self.memory) + sum(sum(trace.calls[at].hidden) for at in self.inside)


def let_go_of(trace: StageTrace, pieces: Iterable[Piece]) -> tuple[LetGo, ...]:
    """Of the blocks of a stage, in their order."""
    return tuple(_of(trace, piece) for piece in pieces if piece.stage == trace.index)


def _of(trace: StageTrace, piece: Piece) -> LetGo:
    numbers = [at for at, call in enumerate(trace.calls) if call.name in piece.nodes]
    rerun = {(call.name, call.changed) for call in piece.again}
    again = tuple(at for at, call in enumerate(trace.calls) if (call.name, call.changed) in rerun)
    inside = frozenset(at for at in numbers if _is_inside(trace.calls[at], piece))
    reads = [at for at, call in enumerate(trace.calls) if at in inside or not piece.let_go.isdisjoint(call.keeps)]
    sources = frozenset(piece.sources - trace.outside)
    return LetGo(max(numbers), max(reads), piece.let_go, sources, inside, again)


def _is_inside(call: Call, piece: Piece) -> bool:
    return call.changed is None and call.name in piece.insides
