"""The memory that recomputed blocks free, as calls and memory of a stage's trace.

forward     freed values live until the end of the block
between     only the inputs of the rerun are held, and the tensors that autograd still saves
backward    before the first call that reads one, its block is recomputed; each value is freed after its last reader
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from passes.pieces import Piece
from planner.saved.trace import Call, StageTrace


@dataclass(frozen=True, slots=True)
class LetGo:
    """The freed memory of one block. ``end``: the number of its last call. ``reads``: of the last call with a backward
    that reads freed memory. ``memory`` that is freed, and ``inside``: calls with freed hidden tensors; ``sources`` are
    held for the rerun.
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
    numbers = [at for at, call in enumerate(trace.calls) if not call.names.isdisjoint(piece.nodes)]
    rerun = {(call.name, call.changed) for call in piece.again}
    again = tuple(at for at, call in enumerate(trace.calls) if (call.name, call.changed) in rerun)
    inside = frozenset(at for at in numbers if _is_inside(trace.calls[at], piece))
    memory = _memory(trace, piece, again)
    reads = [at for at, call in enumerate(trace.calls) if at in inside or not memory.isdisjoint(call.keeps)]
    sources = frozenset(piece.sources - trace.outside)
    return LetGo(max(numbers), max(reads, default=max(numbers)), memory, sources, inside, again)


def _memory(trace: StageTrace, piece: Piece, again: Iterable[int]) -> frozenset[int]:
    """What the block frees of the memory that its calls keep, its compiled pieces too."""
    kept = {memory for call in trace.calls for memory in call.keeps}
    made = {memory for at in again for memory in trace.calls[at].makes}
    return piece.let_go & kept | (trace.saved_again & made) - piece.sources


def _is_inside(call: Call, piece: Piece) -> bool:
    return bool(call.hidden) and not piece.insides.isdisjoint(call.ops)
