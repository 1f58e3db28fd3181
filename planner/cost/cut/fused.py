"""The kernels of compiled pieces: one in each direction, which moves the values that cross the border of its piece.

forward    what the piece reads from outside, and what is read outside of it
backward   the gradients of its results, what it reads from outside (the rest is recomputed in registers), and the
           gradients of that; a value that several of its calls read has one, summed inside of the kernel

For its backward a piece saves as AOTAutograd cuts it: the fewest bytes from which all that its ops would save follow.
In registers nothing is dear: only products, random draws and exchanges are, and none of them is in a piece.

    begin → m       m is read by the piece, and made outside of it
    m in → m out    the bytes of m; none if another call saves m anyway, or the stage does not own it
    r out → m in    a call of the piece makes m of r
    m out → end     an op of the piece saves m
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from passes.pieces import CompiledPiece, Piece
from planner.cost.cut.ops import OpsOf, made_of
from planner.cost.cut.units import CallOps, Op
from planner.recompute.decide import least_cut, with_reruns
from planner.trace.lowered import Lowered
from planner.trace.trace import StageTrace, TraceCall


def fuse(
    trace: StageTrace, ops: OpsOf, kernels: Sequence[CallOps], pieces: Iterable[CompiledPiece]
) -> tuple[list[CallOps], dict[int, int]]:
    """Return the kernels of each call: a piece's first call has all of the piece's, its other calls have none; and
    index of a call → its piece. ``kernels``: of each call by itself; ``pieces``: the compiled ones of all stages.
    """
    calls_of = {piece.index: numbers for piece, numbers in calls_of_pieces(trace, pieces).items()}
    found, readers = list(kernels), _readers(trace)
    for numbers in calls_of.values():
        for at in numbers:
            found[at] = CallOps()
        found[numbers[0]] = _kernels(trace, ops, numbers, readers)
    return found, {at: piece for piece, numbers in calls_of.items() for at in numbers}


def _readers(trace: StageTrace) -> dict[int, set[int]]:
    """Return memory → the calls that read it; −1: a later stage."""
    found: dict[int, set[int]] = {}
    for at, call in enumerate(trace.calls):
        for number in call.operands:
            found.setdefault(trace.values[number].memory, set()).add(at)
    for memory in trace.sent.values():
        found.setdefault(memory, set()).add(-1)
    return found


def _kernels(trace: StageTrace, ops: OpsOf, numbers: Sequence[int], readers: dict[int, set[int]]) -> CallOps:
    calls = [trace.calls[at] for at in numbers]
    made = made_of(calls)
    given = dict.fromkeys(n for call in calls for n in call.operands if trace.values[n].memory not in made)
    results = _results(trace, calls, {m for m in made if readers.get(m, set()) - set(numbers)})
    if not results:  # no reader: the last result is written all the same
        results = list(calls[-1].results[:1])
    moved = ops.sizes_of(given)
    forward = Op(ops.dtype_of(calls[0]), moved.plus(ops.sizes_of(results)))
    wanted = [n for n in results if trace.values[n].like.requires_grad]
    if not wanted:
        return CallOps((forward,))
    new = [n for n in given if trace.values[n].like.requires_grad]
    backward = Op(forward.dtype, moved.plus(ops.sizes_of(wanted)).plus(ops.sizes_of(new)))
    return CallOps((forward,), (backward,))


def _results(trace: StageTrace, calls: Sequence[TraceCall], memories: set[int]) -> list[int]:
    found: dict[int, int] = {}
    for call in calls:
        for number in call.results:
            if trace.values[number].memory in memories:
                found.setdefault(trace.values[number].memory, number)
    return list(found.values())


def with_fused_saves(
    trace: StageTrace, pieces: Sequence[CompiledPiece], recomputed: Sequence[Piece] = ()
) -> StageTrace:
    """Return the trace in which calls of ``pieces`` keep what the functions of these save; memory keeps its numbers."""
    if not pieces:
        return trace
    calls, again = list(trace.calls), set[int]()
    rerun = {call.name for piece in recomputed if piece.stage == trace.index for call in piece.again}
    savers: dict[int, set[int]] = {}
    for at, call in enumerate(calls):
        for memory in call.keeps:
            savers.setdefault(memory, set()).add(at)
    for numbers in calls_of_pieces(trace, pieces).values():
        saved = _saved(trace, calls, numbers, savers)
        for at, keeps in saved.items():
            calls[at] = replace(calls[at], keeps=keeps)
        if all(calls[at].name in rerun for at in numbers):
            again |= {memory for keeps in saved.values() for memory in keeps}
    return replace(trace, calls=calls, saved_again=frozenset(again - trace.outside))


def edited(lowered: Lowered, index: int) -> StageTrace:
    """Return the trace of a stage as it runs: with its compiled pieces, and with what its recomputed blocks free."""
    trace = with_fused_saves(lowered.trace(index), lowered.pieces, lowered.recomputed)
    return with_reruns(trace, lowered.recomputed)


def calls_of_pieces(trace: StageTrace, pieces: Iterable[CompiledPiece]) -> dict[CompiledPiece, list[int]]:
    """Return numbers of the calls of each piece of the stage; ``pieces``: of all stages."""
    piece_of = {name: piece for piece in pieces if piece.stage == trace.index for name in piece.nodes}
    found: dict[CompiledPiece, list[int]] = {}
    for at, call in enumerate(trace.calls):
        if call.changed is None and call.name in piece_of:
            found.setdefault(piece_of[call.name], []).append(at)
    return found


def _saved(
    trace: StageTrace, calls: Sequence[TraceCall], numbers: Sequence[int], savers: Mapping[int, set[int]]
) -> dict[int, tuple[int, ...]]:
    """Return the memory that each call of a piece keeps: its maker, or the first call, keeps a saved memory."""
    inside = set(numbers)
    wanted = {m for at in numbers for m in calls[at].keeps} - trace.outside
    if not wanted:
        return {}
    free = {m for at in numbers for m in (*calls[at].reads, *calls[at].makes) if savers.get(m, set()) - inside}
    saved = _least(trace, [calls[at] for at in numbers], wanted, free)
    makers = {m: at for at in reversed(numbers) for m in calls[at].makes}
    of_call: dict[int, list[int]] = {at: [] for at in numbers}
    for memory in sorted(saved):
        of_call[makers.get(memory, numbers[0])].append(memory)
    return {at: tuple(keeps) for at, keeps in of_call.items()}


def _least(trace: StageTrace, calls: Sequence[TraceCall], wanted: set[int], free: set[int]) -> set[int]:
    """Return the cut of least bytes, of memory that the stage owns."""
    made = made_of(calls)
    free = free | trace.outside
    sizes = {m: 0 if m in free else trace.bytes_of[m] for call in calls for m in (*call.reads, *call.makes)}
    given = sizes.keys() - made
    feeds = [(read, m) for call in calls for m in call.makes if m in made for read in call.reads]
    return least_cut(sizes, given, feeds, wanted) - trace.outside if given else wanted
