"""The tensors that compiled pieces save for their backward: as AOTAutograd cuts them, fewer than their ops do.

A compiled backward computes values of its piece again from those that it saved. It saves the fewest bytes from which
all others follow, a minimum cut:

    begin → m       m is read by the piece, and made outside of it
    m in → m out    the bytes of m; none if another call saves m anyway, or the stage does not own it
    r out → m in    a call of the piece makes m of r
    m out → end     an op of the piece saves m

In registers nothing is dear: only products, random draws and exchanges are, and none of them is in a piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from passes.pieces import CompiledPiece, Piece
from planner.saved.trace import Call, StageTrace

_BEGIN, _END = -1, -2


def with_fused_saves(
    trace: StageTrace, pieces: Sequence[CompiledPiece], recomputed: Sequence[Piece] = ()
) -> StageTrace:
    """The trace in which calls of ``pieces`` keep what the functions of these save; memory keeps its numbers."""
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


def calls_of_pieces(trace: StageTrace, pieces: Iterable[CompiledPiece]) -> dict[CompiledPiece, list[int]]:
    """Numbers of the calls of each piece of the stage; ``pieces``: of all stages."""
    piece_of = {name: piece for piece in pieces if piece.stage == trace.index for name in piece.nodes}
    found: dict[CompiledPiece, list[int]] = {}
    for at, call in enumerate(trace.calls):
        if call.changed is None and call.name in piece_of:
            found.setdefault(piece_of[call.name], []).append(at)
    return found


def _saved(
    trace: StageTrace, calls: Sequence[Call], numbers: Sequence[int], savers: Mapping[int, set[int]]
) -> dict[int, tuple[int, ...]]:
    """What each call of a piece keeps: a saved memory is kept by its maker, or by the first call."""
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


def _least(trace: StageTrace, calls: Sequence[Call], wanted: set[int], free: set[int]) -> set[int]:
    """The cut of least bytes, of memory that the stage owns."""
    import networkx as nx  # here, not above: only this needs it

    made = {memory for call in calls for memory in call.makes if memory not in call.reads}
    graph = nx.DiGraph()
    for memory in dict.fromkeys(m for call in calls for m in (*call.reads, *call.makes)):
        size = 0 if memory in free or memory in trace.outside else trace.bytes_of[memory]
        graph.add_edge(2 * memory, 2 * memory + 1, capacity=size)
        if memory not in made:
            graph.add_edge(_BEGIN, 2 * memory)
        if memory in wanted:
            graph.add_edge(2 * memory + 1, _END)
    for call in calls:
        graph.add_edges_from((2 * read + 1, 2 * m) for m in call.makes if m in made for read in call.reads)
    if not graph.has_node(_BEGIN):
        return wanted
    _, (reached, _) = nx.minimum_cut(graph, _BEGIN, _END)
    cut = {n // 2 for n in reached if n >= 0 and n % 2 == 0 and n + 1 not in reached}
    return cut - trace.outside
