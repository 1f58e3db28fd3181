"""The kernels of compiled pieces: one in each direction, which moves what crosses the border of its piece.

forward    what the piece reads from outside, and what is read outside of it
backward   the gradients of its results, what it reads from outside (the rest is recomputed in registers), and the
           gradients of that

Sums of gradients of a value that several calls of a piece read are inside of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from passes.pieces import CompiledPiece
from planner.cost.cut.kernels import CallOps, Op, Size
from planner.cost.cut.ops import OpsOf
from planner.cost.fused_saves import calls_of_pieces
from planner.saved.trace import Call, StageTrace


@dataclass(frozen=True, slots=True)
class FusedCalls:
    """``kernels``: of each call of a stage; the first call of a piece has all of the piece's, its others none.
    ``piece_of``: index of a call → its piece."""

    kernels: list[CallOps]
    piece_of: dict[int, int]


def fuse(trace: StageTrace, ops: OpsOf, kernels: Sequence[CallOps], pieces: Iterable[CompiledPiece]) -> FusedCalls:
    """``kernels``: of each call by itself; ``pieces``: the compiled ones of all stages."""
    calls_of = {piece.index: numbers for piece, numbers in calls_of_pieces(trace, pieces).items()}
    found, readers = list(kernels), _readers(trace)
    for numbers in calls_of.values():
        for at in numbers:
            found[at] = CallOps()
        found[numbers[0]] = _kernels(trace, ops, numbers, readers)
    return FusedCalls(found, {at: piece for piece, numbers in calls_of.items() for at in numbers})


def _readers(trace: StageTrace) -> dict[int, set[int]]:
    """Memory → the calls that read it; −1: a later stage."""
    found: dict[int, set[int]] = {}
    for at, call in enumerate(trace.calls):
        for number in call.operands:
            found.setdefault(trace.values[number].memory, set()).add(at)
    for memory in trace.sent.values():
        found.setdefault(memory, set()).add(-1)
    return found


def _kernels(trace: StageTrace, ops: OpsOf, numbers: Sequence[int], readers: dict[int, set[int]]) -> CallOps:
    calls = [trace.calls[at] for at in numbers]
    made = {memory for call in calls for memory in call.makes if memory not in call.reads}
    given = dict.fromkeys(n for call in calls for n in call.operands if trace.values[n].memory not in made)
    results = _results(trace, calls, {m for m in made if readers.get(m, set()) - set(numbers)})
    if not results:  # no reader: the last result is written all the same
        results = list(calls[-1].results[:1])
    moved = _sum(ops, given)
    forward = Op(ops.dtype_of(calls[0]), moved.plus(_sum(ops, results)))
    wanted = [n for n in results if trace.values[n].like.requires_grad]
    if not wanted:
        return CallOps((forward,))
    new = [n for n in given if trace.values[n].like.requires_grad]
    backward = Op(forward.dtype, moved.plus(_sum(ops, wanted)).plus(_sum(ops, new)))
    return CallOps((forward,), (backward,))


def _results(trace: StageTrace, calls: Sequence[Call], memories: set[int]) -> list[int]:
    """A value of each of ``memories``."""
    found: dict[int, int] = {}
    for call in calls:
        for number in call.results:
            if trace.values[number].memory in memories:
                found.setdefault(trace.values[number].memory, number)
    return list(found.values())


def _sum(ops: OpsOf, numbers: Iterable[int]) -> Size:
    total = Size()
    for number in numbers:
        total = total.plus(ops.size_of(number))
    return total
