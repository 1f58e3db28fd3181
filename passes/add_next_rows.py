"""Let the stage of the loss return, beside the loss, the logits of one position of each sequence.

    return loss      →      return next_rows(logits, places, wanted, …), loss

The logits are those that the loss reads, and ``places`` are computed as for scores (passes.add_scores).

Needs:   a localised graph (passes.localize).
Leaves:  collectives are those of the plan and of planner.exchanges.next_rows.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import fx

from passes.add_scores import call, places_of
from passes.base import LowerContext, StageGraph
from passes.insert_collectives import axis_node
from passes.ops.next_rows import Wanted, next_rows
from passes.partition.loss.scored import Pick, find_scored, is_over_classes

aten = torch.ops.aten
WANTED = "wanted"  # the attribute of the stage's module


def add_next_rows(stage: StageGraph, context: LowerContext) -> None:
    """One call for each look-up of targets; their results add up, as each has the rows of its own labels."""
    program = context.staged.program
    scored = find_scored(program)
    (name,) = (name for name, key in program.inputs.items() if key == scored.key)
    labels = stage.env[name]
    setattr(stage.root, WANTED, Wanted(context.random))
    with stage.graph.inserting_before(next(iter(stage.graph.nodes))):
        wanted = stage.graph.create_node("get_attr", WANTED)
    parts = [_rows(stage, context, labels, wanted, pick) for pick in scored.picks]
    output = stage.graph.output_node()
    with stage.graph.inserting_before(output):
        whole = reduce(lambda a, b: call(stage, labels, aten.add.Tensor, (a, b), parts[0].meta["val"]), parts)
    *sent, loss = output.args[0]  # pyright: ignore[reportGeneralTypeIssues]
    output.args = ((*sent, whole, loss),)
    output.meta["names"] = (*output.meta["names"][:-1], "scores", output.meta["names"][-1])
    stage.has_scores = True


def _rows(stage: StageGraph, context: LowerContext, labels: fx.Node, wanted: fx.Node, pick: Pick) -> fx.Node:
    reader = stage.env[pick.node]
    logits, target = reader.args[0], reader.args[pick.target]
    assert isinstance(logits, fx.Node)
    assert isinstance(target, fx.Node)
    over_classes = is_over_classes(context.staged.placements, context.staged.program.node(pick.node), pick)
    is_counted = context.tp.rank == 0 or (logits.meta["placement"].is_sharded and not over_classes)
    handle = axis_node(stage, context.tp) if over_classes else None
    with stage.graph.inserting_before(reader):
        places = places_of(stage, labels, target)
        value = torch.empty((len(labels.meta["val"]), pick.num_classes + 1), device="meta")
        given = (logits, places, wanted, handle, pick.class_dim, pick.num_classes, is_counted)
        return call(stage, reader, next_rows, given, value)
