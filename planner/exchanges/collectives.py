"""The collectives' rows of forward and backward: every exchange of a microbatch, in the order of the stages.

They are read off the traces of the lowered stages: an op without values notes each collective that it would run. Two
kinds stand here: rows on their way to experts, of which the number follows the routing (rows_of_experts), and the
values that cross a cut between stages, sent and received, with their gradients on the way back.

``bytes`` are those of the full tensor: the sum of an all-reduce, the result of an all-gather, the operand of a
reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from passes.blocks.places import Places
from passes.moe.exchange import EXCHANGES
from passes.pieces import Piece
from passes.types.collectives import CollectivePlan
from planner.decisions import Decisions
from planner.exchanges.rows_of_experts import exchange_rows
from planner.saved.lowered import Lowered
from planner.saved.trace import Call
from planner.sharding.shards import Shards


def collective_rows(lowered: Lowered, places: Places, recomputed: Sequence[Piece] = ()) -> tuple[CollectivePlan, ...]:
    """One row for each exchange of a microbatch."""
    rows = rows_of_stages(lowered, places, recomputed)
    if lowered.decisions.terms.in_turn > 1:  # all forwards of a step run twice
        rows = [replace(row, count=2) if row.phase == "forward" else row for row in rows]
    return tuple(rows)


def rows_of_stages(lowered: Lowered, places: Places, recomputed: Sequence[Piece] = ()) -> list[CollectivePlan]:
    """One row for each exchange of a forward and a backward of a microbatch."""
    decisions, shards = lowered.decisions, lowered.shards
    rows: list[CollectivePlan] = []
    for stage in range(lowered.num_stages):
        calls = lowered.trace(stage).calls
        rows += _boundary_rows(decisions, shards, places, stage - 1, stage)
        rows += (row for call in calls for row in rows_of_call(decisions, call, stage, places))
        rerun = {(call.name, call.changed) for piece in recomputed if piece.stage == stage for call in piece.again}
        repeated = [call for call in calls if (call.name, call.changed) in rerun]
        rows += (row for call in repeated for row in _again_rows(decisions, call, stage, places))
        rows += _boundary_rows(decisions, shards, places, stage, stage)
    return rows


def rows_of_call(decisions: Decisions, call: Call, stage: int, places: Places) -> Iterator[CollectivePlan]:
    """The collectives of one call on ``stage``, in both directions."""
    node = decisions.program.node(call.name)
    if call.changed is None and node.target in EXCHANGES and decisions.mesh.has_expert_axes:
        yield from exchange_rows(decisions, node, stage, places)
        return
    if call.changed is not None and call.changed.how.name in ("f", "gather"):  # at whoever wants it
        reader = call.changed.readers[0]
        node = decisions.program.node(reader) if reader not in ("send", "loss") else node
    for axis, kind, phase, size in call.seen.sent:
        yield CollectivePlan(kind, axis, phase, places.text(node), size, 1, "microbatch", stage, places.block(node))


def _again_rows(decisions: Decisions, call: Call, stage: int, places: Places) -> Iterator[CollectivePlan]:
    """The collectives of a rerun: those of its forward, in the backward."""
    for row in rows_of_call(decisions, call, stage, places):
        if row.phase == "forward":
            yield replace(row, phase="backward", again=True)


def _boundary_rows(
    decisions: Decisions, shards: Shards, places: Places, cut: int, stage: int
) -> Iterator[CollectivePlan]:
    """The messages that ``stage`` sends or receives at ``cut``; chunks of one rank hand their values over without a
    message.
    """
    if cut < 0 or decisions.mesh.pp_rank_of(cut) == decisions.mesh.pp_rank_of(cut + 1):
        return
    sends = cut == stage
    for value in shards.boundaries[cut]:
        node = decisions.program.node(value.name)
        for phase in ("forward", "backward") if value.requires_grad else ("forward",):
            kind = "send" if sends == (phase == "forward") else "recv"
            yield CollectivePlan(
                kind, "pp", phase, places.text(node), value.bytes, 1, "microbatch", stage, places.block(node)
            )
