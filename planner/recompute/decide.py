"""Decide for each recomputed block which saved tensors are freed, and from which values they are recomputed.

    full         all tensors that autograd saves for this block alone; the rerun begins at its inputs
    selective    tensors that are cheap for their bytes (planner.recompute.selective); the rerun begins at those that
    are kept

Values that others read (the block's outputs), the experts' domain and its exchanged values are never freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from passes.pieces import AgainCall, Homes, Piece
from passes.regions import Region
from planner.decisions import Decisions
from planner.recompute.asked import FULL, kinds_of_blocks
from planner.recompute.memories import Memories, Scene, closure, sources_of
from planner.recompute.pieces import pieces_of
from planner.recompute.selective import kept_memories, worth_inside
from planner.saved.trace import Call, StageTrace, trace_stage
from planner.sharding.shards import Shards


def decide_recompute(
    asked: str | Mapping[str, str],
    decisions: Decisions,
    shards: Shards,
    regions: Sequence[Region],
    traced: Callable[[int], StageTrace] | None = None,
) -> tuple[Piece, ...]:
    """The pieces of all stages that free some tensor. ``traced``: the trace of a stage, if the caller has it.

    Raises PlanError for a glob that names no block.
    """
    kinds = kinds_of_blocks(asked, decisions.blocks)
    pieces = pieces_of(kinds, decisions, regions)
    for stage in sorted({piece.stage for piece in pieces}):
        trace = traced(stage) if traced is not None else trace_stage(decisions, shards, stage)
        scene = Scene(decisions, trace, Homes(stage, pieces, regions))
        for piece in pieces:
            if piece.stage == stage:
                _decide(piece, Memories(scene, piece))
    return tuple(piece for piece in pieces if piece.again)


def _decide(piece: Piece, memories: Memories) -> None:
    once = {m for m, call in memories.maker.items() if memories.runs_once(call)}
    worth = [call for call in memories.calls if call.hidden and worth_inside(memories, call)]
    kept = memories.seen | once
    if piece.kind != FULL:
        kept |= kept_memories(memories, worth)
    needed = sorted(memories.saved - kept)
    again = closure(memories, needed, worth, kept)
    insides = [c for c in again if c.hidden] if piece.kind == FULL else worth
    keys = memories.scene.keys
    piece.needed = tuple(frozenset(keys[m]) for m in needed)
    piece.kept = frozenset(key for m in kept if m in memories.maker for key in keys.get(m, ()))
    piece.insides = frozenset(call.name for call in insides if call.changed is None)
    piece.let_go, piece.sources = frozenset(needed), frozenset(sources_of(memories, needed, again))
    piece.again = tuple(_row(memories, call, needed, insides) for call in again)


def _row(memories: Memories, call: Call, needed: Sequence[int], insides: Sequence[Call]) -> AgainCall:
    let_go = set(needed)
    given = sum(memories.bytes(m) for m in memories.made(call) if m in let_go)
    hidden = sum(call.hidden) if any(call is other for other in insides) else 0
    return AgainCall(call.name, given + hidden, memories.flops(call), memories.moved(call), call.changed)
