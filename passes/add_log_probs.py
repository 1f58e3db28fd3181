"""Let the stage of the loss return the log-probability of each label of the batch in place of the loss.

    return loss      →      return g(log_probs_of_targets(logits, target, places, labels, …), cp)

They are complete on every rank: ranks that hold other tokens add theirs. The gradient that comes back is the same on
these ranks, and each takes the part of its own tokens: nothing is exchanged in the backward.

Needs:   a localised graph (passes.localize).
Leaves:  no op that only the loss reads; collectives are those of planner.exchanges.log_probs.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import fx

from passes.add_scores import call, places_of
from passes.base import LowerContext, StageGraph
from passes.insert_collectives import axis_node
from passes.ops.axis import AxisHandle
from passes.ops.collectives import g
from passes.ops.log_probs import log_probs_of_targets
from passes.partition.loss.scored import Pick, find_scored, is_over_classes
from passes.types.types import Placement

aten = torch.ops.aten
WHOLE = Placement("I")


def add_log_probs(stage: StageGraph, context: LowerContext) -> None:
    """One call for each look-up of targets; their results add up, as each is zero at labels without a target."""
    if not stage.has_loss:
        return
    program = context.staged.program
    scored = find_scored(program)
    (name,) = (name for name, key in program.inputs.items() if key == scored.key)
    labels = stage.env[name]
    parts = [_log_probs(stage, context, labels, pick) for pick in scored.picks]
    output = stage.graph.output_node()
    with stage.graph.inserting_before(output):
        whole = reduce(lambda a, b: _call(stage, a, aten.add.Tensor, (a, b)), parts)
        if "cp" in context.axes:
            whole = _sum(stage, whole, context.axes["cp"])
    *sent, _ = output.args[0]  # pyright: ignore[reportGeneralTypeIssues]
    output.args = ((*sent, whole),)
    output.meta["names"] = (*output.meta["names"][:-1], "log_probs")
    stage.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    stage.env = {name: node for name, node in stage.env.items() if node in set(stage.graph.nodes)}


def _log_probs(stage: StageGraph, context: LowerContext, labels: fx.Node, pick: Pick) -> fx.Node:
    reader = stage.env[pick.node]
    logits, target = reader.args[0], reader.args[pick.target]
    assert isinstance(logits, fx.Node)
    assert isinstance(target, fx.Node)
    over_classes = is_over_classes(context.staged.placements, context.staged.program.node(pick.node), pick)
    handle = axis_node(stage, context.tp) if over_classes else None
    with stage.graph.inserting_before(reader):
        places = places_of(stage, labels, target)
        value = torch.empty(labels.meta["val"].shape, dtype=torch.float64, device="meta")
        given = (logits, target, places, labels, handle, pick.class_dim, pick.num_classes, pick.ignored)
        found = call(stage, reader, log_probs_of_targets, given, value)
        found.meta |= {"grad": True, "placement": WHOLE}
        are_rows_cut = logits.meta["placement"].is_sharded and not over_classes
        return _sum(stage, found, context.tp) if are_rows_cut else found


def _sum(stage: StageGraph, value: fx.Node, axis: AxisHandle) -> fx.Node:
    """Over ranks that hold other tokens."""
    handle = axis_node(stage, axis)
    return _call(stage, value, g, (value, handle))


def _call(stage: StageGraph, like: fx.Node, function: object, args: tuple[object, ...]) -> fx.Node:
    new = call(stage, like, function, args, like.meta["val"])
    new.meta["grad"] = True
    return new
