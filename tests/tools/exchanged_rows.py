"""The collectives of scores and of next tokens, beside those of a forward of the plan; a plan lists those of training.

scores         over tp, a microbatch      per token the maximum, then three scalars    if logits are cut over classes
               over all ranks, a batch    log P, top and count of every label
next tokens    over tp, a microbatch      one row of logits of each sequence           if logits are cut over classes
               over all ranks, a forward  token, count and fault of each sequence
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod

from passes.partition.loss.scored import is_over_classes
from passes.types.conversions import ALL_GATHER, ALL_REDUCE, CollectivePlan
from planner.decisions import Decisions
from planner.exchanges.collectives import FIGURES, WIDE, check_scored


def score_rows(decisions: Decisions, num_sequences: int) -> list[CollectivePlan]:
    """One row for each exchange; ``num_sequences`` are those of the global batch."""
    found = []
    for logits, num_classes, _ in _over_classes(decisions):
        num_tokens = logits.numel() // num_classes
        for size in (max(4, logits.element_size()), FIGURES * WIDE):
            found.append(_over_tp(decisions, ALL_REDUCE, size * num_tokens))
    return found + _over_all(decisions, num_sequences * prod(decisions.batch_inputs[decisions.scored.key][0]))


def next_token_rows(decisions: Decisions, num_sequences: int) -> list[CollectivePlan]:
    """One row for each exchange; ``num_sequences`` are those of the global batch."""
    (labels,) = (n for n, key in decisions.program.inputs.items() if key == decisions.scored.key)
    micro, found = len(decisions.program.node(labels).meta["val"]), []
    for logits, num_classes, padding in _over_classes(decisions):
        columns = ceil((num_classes + padding) / decisions.mesh.tp) * decisions.mesh.tp
        found.append(_over_tp(decisions, ALL_GATHER, max(4, logits.element_size()) * micro * columns))
    return found + _over_all(decisions, num_sequences)


def _over_classes(decisions: Decisions) -> Iterator[tuple]:
    """Logits that are cut over the classes, how many classes there are, and their padding."""
    check_scored(decisions)
    for pick in decisions.scored.picks:
        node = decisions.program.node(pick.node)
        if is_over_classes(decisions.placements, node, pick):
            padding = decisions.placements.wanted(node, 0).padding
            yield node.all_input_nodes[0].meta["val"], pick.num_classes, padding


def _over_tp(decisions: Decisions, kind: str, size: int) -> CollectivePlan:
    return CollectivePlan(kind, "tp", "forward", "", size, 1, "microbatch", decisions.stages.num_stages - 1)


def _over_all(decisions: Decisions, count: int) -> list[CollectivePlan]:
    key, size = decisions.scored.key, FIGURES * WIDE * count
    return [CollectivePlan(ALL_REDUCE, "world", "step", key, size, 1, "step")] if decisions.mesh.world_size > 1 else []
