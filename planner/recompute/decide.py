"""Decide for each recomputed block which saved tensors are freed, and from which values they are recomputed.

    full         all tensors that autograd saves for this block alone; the rerun begins at its inputs
    selective    tensors that are cheap for their bytes (planner.recompute.selective); the rerun begins at those that
    are kept

Values that others read (the block's outputs), and the numbers of rows that experts get, are never freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from passes.pieces import AgainCall, Homes, Piece
from planner.recompute.asked import FULL, kinds_of_blocks
from planner.recompute.memories import Memories, Scene, closure, sources_of
from planner.recompute.pieces import pieces_of
from planner.recompute.selective import kept_memories, worth_inside
from planner.saved.lowered import Lowered
from planner.saved.trace import Call


def decide_recompute(asked: str | Mapping[str, str], lowered: Lowered) -> tuple[Piece, ...]:
    """The pieces of all stages that free some tensor. Raises PlanError for a glob that names no block."""
    decisions, regions = lowered.decisions, lowered.regions
    kinds = kinds_of_blocks(asked, decisions.blocks)
    pieces = pieces_of(kinds, decisions, regions)
    for stage in sorted({piece.stage for piece in pieces}):
        scene = Scene(decisions, lowered.trace(stage), Homes(stage, pieces, regions))
        for piece in pieces:
            if piece.stage == stage:
                _decide(piece, Memories(scene, piece))
    return tuple(piece for piece in pieces if piece.again)


def _decide(piece: Piece, memories: Memories) -> None:
    once = {m for call in memories.calls if memories.runs_once(call) for m in memories.written(call)}
    worth = [call for call in memories.calls if call.hidden and _reruns(piece, memories, call)]
    kept = memories.seen | once
    if piece.kind != FULL:
        kept |= kept_memories(memories, worth)
    needed = sorted(memories.saved - kept)
    again = closure(memories, needed, worth, kept)
    insides = [c for c in again if c.hidden] if piece.kind == FULL else worth
    keys = memories.scene.keys
    piece.needed = tuple(frozenset(keys[m]) for m in needed)
    piece.kept = frozenset(key for m in kept if m in memories.maker for key in keys.get(m, ()))
    piece.insides = frozenset(name for call in insides for name in call.ops)
    piece.overwrites = frozenset(name for call in again if call.overwrites for name in call.ops)
    piece.let_go, piece.sources = frozenset(needed), frozenset(sources_of(memories, needed, again))
    piece.again = tuple(row for call in again for row in _rows(memories, call, needed, insides))


def _reruns(piece: Piece, memories: Memories, call: Call) -> bool:
    """Whether the insides of a call are freed: full frees what products gather, too."""
    return (piece.kind == FULL and call.changed is not None) or worth_inside(memories, call)


def _rows(memories: Memories, call: Call, needed: Sequence[int], insides: Sequence[Call]) -> Iterator[AgainCall]:
    """Of each op of a call: the last gives its result. Of a call that changes a type, the change too."""
    restored = sum(memories.bytes(m) for m in memories.made(call) if m in set(needed))
    restored += sum(call.hidden) if any(call is other for other in insides) else 0
    moved = memories.moved(call)
    if call.changed is not None:
        yield AgainCall(call.name, 0 if call.ops else restored, 0, 0 if call.ops else moved, call.changed)
    for number, name in enumerate(call.ops, 1):
        is_last = number == len(call.ops)
        yield AgainCall(name, restored if is_last else 0, memories.flops_of(name), moved if is_last else 0)
