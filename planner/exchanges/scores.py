"""The collectives for the scores of labels, beside those of a forward of the plan.

    over tp, a microbatch      per token the maximum, then three scalars      if logits are sharded over the vocabulary
    over all ranks, a batch    log P, top and count of every label            each rank gives those of its own tokens

These rows are no part of a plan, which lists the collectives of training: only ``Engine.score`` runs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from passes.blocks.places import Places
from passes.errors import PlanError
from passes.partition.loss.scored import Pick, is_over_classes
from passes.program.source_lines import where_of
from passes.types.collectives import CollectivePlan
from passes.types.conversions import ALL_REDUCE
from planner.decisions import Decisions

WIDE = 8  # bytes of a float64
FIGURES = 3  # of each label: log P, whether it is the top, how often it was scored


def score_rows(decisions: Decisions, num_sequences: int) -> tuple[CollectivePlan, ...]:
    """One row for each exchange; ``num_sequences`` are those of the global batch.

    Raises PlanError for a loss that gives no target a probability.
    """
    check_scored(decisions)
    rows = [row for pick in decisions.scored.picks for row in _rows_of_pick(decisions, pick)]
    if decisions.mesh.world_size > 1:
        key = decisions.scored.key
        size = FIGURES * WIDE * num_sequences * prod(decisions.batch_inputs[key][0])
        rows.append(CollectivePlan(ALL_REDUCE, "world", "step", key, size, 1, "step"))
    return tuple(rows)


def check_scored(decisions: Decisions) -> None:
    """Raises PlanError if the loss gives no target a probability, or a stage before that of the loss looks it up."""
    last = decisions.stages.num_stages - 1
    for pick in decisions.scored.picks:
        if not decisions.stages.runs_on(pick.node, last):
            raise PlanError(
                "a part of the loss is computed before the last stage, but only the last stage scores labels",
                where=where_of(decisions.program.node(pick.node)),
                fix="set mesh.pp: 1, or change pipeline.split",
            )
        reader = decisions.program.node(pick.node)
        if decisions.placements.wanted(reader, 0).kind not in ("I", "V"):
            raise PlanError(
                "the targets' logits are partial sums over tp where the loss looks them up",
                where=where_of(reader),
                fix="set tensor_parallel.overrides: {HEAD: replicate}, with the name of the head",
            )


def _rows_of_pick(decisions: Decisions, pick: Pick) -> Iterator[CollectivePlan]:
    node = decisions.program.node(pick.node)
    if not is_over_classes(decisions.placements, node, pick):
        return
    logits, where = node.all_input_nodes[0].meta["val"], Places(decisions.blocks).text(node)
    num_tokens = logits.numel() // pick.num_classes
    for size in (max(4, logits.element_size()), FIGURES * WIDE):
        stage = decisions.stages.num_stages - 1
        yield CollectivePlan(ALL_REDUCE, "tp", "forward", where, size * num_tokens, 1, "microbatch", stage)
