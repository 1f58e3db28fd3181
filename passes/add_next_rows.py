"""Let the stage of the loss return, beside the loss, the logits of one position of each sequence.

    return loss      →      return next_rows(logits, places, wanted, …), loss

The logits are those that the loss reads, and ``places`` are computed as for scores (passes.add_scores).

Needs:   a localised graph (passes.localize).
Leaves:  collectives are those of the plan and of planner.exchanges.next_rows.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.add_scores import call, look_up_of, looked_up, places_of, return_beside_loss
from passes.base import LowerContext, StageGraph
from passes.ops.next_rows import Wanted, next_rows
from passes.partition.loss.scored import Pick

WANTED = "wanted"  # the attribute of the stage's module


def add_next_rows(stage: StageGraph, context: LowerContext) -> None:
    """One call for each look-up of targets; their results add up, as each has the rows of its own labels."""
    labels, picks = looked_up(stage, context)
    setattr(stage.root, WANTED, Wanted(context.random))
    with stage.graph.inserting_before(next(iter(stage.graph.nodes))):
        wanted = stage.graph.create_node("get_attr", WANTED)
    return_beside_loss(stage, labels, [_rows(stage, context, labels, wanted, pick) for pick in picks])


def _rows(stage: StageGraph, context: LowerContext, labels: fx.Node, wanted: fx.Node, pick: Pick) -> fx.Node:
    of = look_up_of(stage, context, pick)
    is_counted = context.tp.rank == 0 or of.are_rows_cut
    with stage.graph.inserting_before(of.reader):
        places = places_of(stage, labels, of.target)
        value = torch.empty((len(labels.meta["val"]), pick.num_classes + 1), device="meta")
        given = (of.logits, places, wanted, of.handle, pick.class_dim, pick.num_classes, is_counted)
        return call(stage, of.reader, next_rows, given, value)
