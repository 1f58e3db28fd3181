"""The kernels of compiled pieces: one in each direction, which reads and writes the values that cross the border.

forward    reads the inputs of the piece, writes the results that others read
backward   reads the gradients of the results and the inputs of the piece (it recomputes the rest in registers), writes
           the gradients of the inputs; those of an input with several readers are summed inside of the kernel

A piece saves for its backward as the partitioner of AOTAutograd does: the fewest bytes from which its ops' saved
tensors can be recomputed, a minimum cut. All ops are cheap in registers, because a piece has no products, random draws
or collectives.

    source → m      m is an input of the piece
    m in → m out    capacity: the bytes of m; 0 if another call saves m anyway, or the stage does not own it
    r out → m in    a call of the piece computes m from r
    m out → sink    an op of the piece saves m
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
    """Return the kernels of each call, with those of a piece at its first call; and index of a call → its piece.
    ``kernels``: of each call without compiling; ``pieces``: the compiled pieces of all stages.
    """
    calls_of = {piece.index: numbers for piece, numbers in calls_of_pieces(trace, pieces).items()}
    fused, readers = list(kernels), _readers(trace)
    for numbers in calls_of.values():
        for at in numbers:
            fused[at] = CallOps()
        fused[numbers[0]] = _kernels(trace, ops, numbers, readers)
    return fused, {at: piece for piece, numbers in calls_of.items() for at in numbers}


def _readers(trace: StageTrace) -> dict[int, set[int]]:
    """Return memory → indices of the calls that read it; −1 stands for a later stage."""
    readers: dict[int, set[int]] = {}
    for at, call in enumerate(trace.calls):
        for number in call.operands:
            readers.setdefault(trace.values[number].memory, set()).add(at)
    for memory in trace.sent.values():
        readers.setdefault(memory, set()).add(-1)
    return readers


def _kernels(trace: StageTrace, ops: OpsOf, numbers: Sequence[int], readers: dict[int, set[int]]) -> CallOps:
    calls = [trace.calls[at] for at in numbers]
    made = made_of(calls)
    inputs = dict.fromkeys(n for call in calls for n in call.operands if trace.values[n].memory not in made)
    results = _results(trace, calls, {m for m in made if readers.get(m, set()) - set(numbers)})
    if not results:  # without a reader, the last result is written nevertheless
        results = list(calls[-1].results[:1])
    moved = ops.sizes_of(inputs)
    forward = Op(ops.dtype_of(calls[0]), moved.plus(ops.sizes_of(results)))
    wanted = [n for n in results if trace.values[n].like.requires_grad]
    if not wanted:
        return CallOps((forward,))
    new = [n for n in inputs if trace.values[n].like.requires_grad]
    backward = Op(forward.dtype, moved.plus(ops.sizes_of(wanted)).plus(ops.sizes_of(new)))
    return CallOps((forward,), (backward,))


def _results(trace: StageTrace, calls: Sequence[TraceCall], memories: set[int]) -> list[int]:
    first: dict[int, int] = {}
    for call in calls:
        for number in call.results:
            if trace.values[number].memory in memories:
                first.setdefault(trace.values[number].memory, number)
    return list(first.values())


def with_fused_saves(
    trace: StageTrace, pieces: Sequence[CompiledPiece], recomputed: Sequence[Piece] = ()
) -> StageTrace:
    """Return the trace in which the calls of ``pieces`` save what their compiled functions save."""
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
    """Return the trace of a stage as it runs: with the saved tensors of compiled pieces, and recomputed blocks."""
    trace = with_fused_saves(lowered.trace(index), lowered.pieces, lowered.recomputed)
    return with_reruns(trace, lowered.recomputed)


def calls_of_pieces(trace: StageTrace, pieces: Iterable[CompiledPiece]) -> dict[CompiledPiece, list[int]]:
    """Return the indices of the calls of each piece of the stage; ``pieces``: of all stages."""
    piece_of = {name: piece for piece in pieces if piece.stage == trace.index for name in piece.nodes}
    calls: dict[CompiledPiece, list[int]] = {}
    for at, call in enumerate(trace.calls):
        if call.changed is None and call.name in piece_of:
            calls.setdefault(piece_of[call.name], []).append(at)
    return calls


def _saved(
    trace: StageTrace, calls: Sequence[TraceCall], numbers: Sequence[int], savers: Mapping[int, set[int]]
) -> dict[int, tuple[int, ...]]:
    """Return the memory that each call of a piece saves: its own results; inputs of the piece at the first call."""
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
    """Return the memory, owned by the stage, of the minimum cut."""
    made = made_of(calls)
    free = free | trace.outside
    sizes = {m: 0 if m in free else trace.bytes_of[m] for call in calls for m in (*call.reads, *call.makes)}
    inputs = sizes.keys() - made
    feeds = [(read, m) for call in calls for m in call.makes if m in made for read in call.reads]
    return least_cut(sizes, inputs, feeds, wanted) - trace.outside if inputs else wanted
