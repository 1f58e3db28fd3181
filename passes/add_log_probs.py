"""Let the stage of the loss return the log-probability of each label of the batch in place of the loss.

    return loss      →      return g(log_probs_of_targets(logits, target, places, labels, …), cp)

They are complete on every rank: ranks that hold other tokens add theirs. The gradient that comes back is the same on
these ranks, and each takes the part of its own tokens: nothing is exchanged in the backward.

Needs:   a localised graph (passes.localize).
Leaves:  no op that only the loss reads.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import fx

from passes.add_scores import call, look_up_of, looked_up, places_of
from passes.base import LowerContext, StageGraph
from passes.insert_collectives import axis_node
from passes.ops.axis import AxisHandle
from passes.ops.collectives import g
from passes.ops.log_probs import log_probs_of_targets
from passes.partition.loss.scored import Pick
from passes.types.types import Placement

aten = torch.ops.aten
WHOLE = Placement("I")


def add_log_probs(stage: StageGraph, context: LowerContext) -> None:
    """One call for each look-up of targets; their results add up, as each is zero at labels without a target."""
    if not stage.has_loss:
        return
    labels, picks = looked_up(stage, context)
    parts = [_log_probs(stage, context, labels, pick) for pick in picks]
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
    of = look_up_of(stage, context, pick)
    with stage.graph.inserting_before(of.reader):
        places = places_of(stage, labels, of.target)
        value = torch.empty(labels.meta["val"].shape, dtype=torch.float64, device="meta")
        given = (of.logits, of.target, places, labels, of.handle, pick.class_dim, pick.num_classes, pick.ignored)
        found = call(stage, of.reader, log_probs_of_targets, given, value)
        found.meta |= {"grad": True, "placement": WHOLE}
        return _sum(stage, found, context.tp) if of.are_rows_cut else found


def _sum(stage: StageGraph, value: fx.Node, axis: AxisHandle) -> fx.Node:
    """Over ranks that hold other tokens."""
    handle = axis_node(stage, axis)
    return _call(stage, value, g, (value, handle))


def _call(stage: StageGraph, like: fx.Node, function: object, args: tuple[object, ...]) -> fx.Node:
    new = call(stage, like, function, args, like.meta["val"])
    new.meta["grad"] = True
    return new
