"""The collectives for the next token of each sequence, beside those of a forward of the plan.

    over tp, a microbatch      one row of logits of each sequence      if logits are sharded over the vocabulary
    over all ranks, a forward  token, count and fault of each sequence; the rank with the row gives them

These rows are no part of a plan, which lists the collectives of training: only ``Engine.generate`` runs them, for each
token once. The first of a batch is computed twice (causality), the second too if keys and values are kept. With kept
keys and values they stand beside the forward of one position (``planner.one_position``).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from passes.blocks.places import Places
from passes.partition.loss.scored import Pick, is_over_classes
from passes.types.collectives import CollectivePlan
from passes.types.conversions import ALL_GATHER, ALL_REDUCE
from planner.decisions import Decisions
from planner.exchanges.scores import check_scored

WIDE = 8  # bytes of an int64
FIGURES = 3  # of each sequence: its next token, how often its row was found, and what is wrong with it


def next_token_rows(decisions: Decisions, num_sequences: int) -> tuple[CollectivePlan, ...]:
    """One row for each exchange; ``num_sequences`` are those of the global batch.

    Raises PlanError for a loss that gives no target a probability.
    """
    check_scored(decisions)
    rows = [row for pick in decisions.scored.picks for row in _rows_of_pick(decisions, pick)]
    if decisions.mesh.world_size > 1:
        size = FIGURES * WIDE * num_sequences
        rows.append(CollectivePlan(ALL_REDUCE, "world", "step", decisions.scored.key, size, 1, "step"))
    return tuple(rows)


def _rows_of_pick(decisions: Decisions, pick: Pick) -> Iterator[CollectivePlan]:
    node, tp = decisions.program.node(pick.node), decisions.mesh.tp
    if not is_over_classes(decisions.placements, node, pick):
        return
    (labels,) = (n for n, key in decisions.program.inputs.items() if key == decisions.scored.key)
    micro = len(decisions.program.node(labels).meta["val"])
    logits = node.all_input_nodes[0]
    padding = decisions.placements.wanted(node, 0).padding
    columns = ceil((pick.num_classes + padding) / tp) * tp
    size = max(4, logits.meta["val"].element_size()) * micro * columns
    where, stage = Places(decisions.blocks).text(node), decisions.stages.num_stages - 1
    yield CollectivePlan(ALL_GATHER, "tp", "forward", where, size, 1, "microbatch", stage)
