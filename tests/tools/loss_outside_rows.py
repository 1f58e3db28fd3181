"""The collectives of a step with a loss outside the model, which reads log-probabilities of labels.

    the plan's rows, without those of the loss itself
    over tp, a microbatch      per token the maximum, then two scalars      if logits are sharded over the vocabulary
    over tp, a microbatch      log P of every label                         if the tokens of the logits are sharded
    over cp, a microbatch      log P of every label

These rows are no part of a plan: only ``forward_backward`` and ``train_step`` with ``loss=function`` run them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from passes.blocks.blocks import Places
from passes.lower import LOCAL, with_head
from passes.ops.loss_head import LOG_P
from passes.pieces import Piece
from passes.types.conversions import CollectivePlan
from planner.decisions import Decisions
from planner.exchanges.collectives import check_scored, rows_of_stages, weight_rows
from planner.pipeline.schedule import SchedulePlan
from planner.sharding.shards import Shards
from planner.trace.lowered import Lowered


def rows_with_loss_outside(
    decisions: Decisions, shards: Shards, schedule: SchedulePlan, recomputed: Sequence[Piece] = ()
) -> tuple[CollectivePlan, ...]:
    """One row for each exchange of a step. Raises PlanError for a loss that gives no target a probability."""
    check_scored(decisions)
    places = Places(decisions.blocks)
    lowered = Lowered(decisions, shards, recomputed=tuple(recomputed), passes=with_head(LOCAL, LOG_P))
    rows = rows_of_stages(lowered, places)
    if decisions.terms.in_turn > 1:  # the forwards of the model's own loss run first, for its sums
        own = rows_of_stages(replace(lowered, recomputed=(), passes=Lowered.passes, _stages={}, _traces={}), places)
        rows += [row for row in own if row.phase == "forward"]
    return (*rows, *shards.at_step, *weight_rows(lowered, schedule))
