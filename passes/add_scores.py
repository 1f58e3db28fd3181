"""Let the stage of the loss return, beside the loss, how probable each label of the batch is to the model.

    return loss      →      return scores_of_targets(logits, target, places, labels, …), loss

The logits are those that the loss reads, as it reads them: sharded over the vocabulary, or complete. ``places`` are
computed by the same calls as the targets, of places instead of labels: so a label's score gets the label's place.

Needs:   a localised graph (passes.localize).
Leaves:  collectives are those of the plan and of planner.exchanges.scores.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import fx

from passes.base import LowerContext, StageGraph
from passes.insert_collectives import axis_node
from passes.ops import collectives, context
from passes.ops.scores import own_places, part_of_places, scores_of_targets
from passes.partition.loss.scored import Pick, Scored, find_scored, is_over_classes
from passes.program.ops.places import PlaceWriter

aten = torch.ops.aten
PARTS = (collectives.slice_part, collectives.cut_part)
MOVES = (context.local_rows, *PARTS)


def add_scores(stage: StageGraph, context: LowerContext) -> None:
    """One call for each look-up of targets; their results add up, as each is zero at labels without a target."""
    program = context.staged.program
    scored = find_scored(program)
    (name,) = (name for name, key in program.inputs.items() if key == scored.key)
    labels = stage.env[name]
    parts = [_scores(stage, context, labels, scored, pick) for pick in scored.picks]
    output = stage.graph.output_node()
    with stage.graph.inserting_before(output):
        whole = reduce(lambda a, b: call(stage, labels, aten.add.Tensor, (a, b), parts[0].meta["val"]), parts)
    *sent, loss = output.args[0]  # pyright: ignore[reportGeneralTypeIssues]
    output.args = ((*sent, whole, loss),)
    output.meta["names"] = (*output.meta["names"][:-1], "scores", output.meta["names"][-1])
    stage.has_scores = True


def _scores(stage: StageGraph, context: LowerContext, labels: fx.Node, scored: Scored, pick: Pick) -> fx.Node:
    reader = stage.env[pick.node]
    logits, target = reader.args[0], reader.args[pick.target]
    assert isinstance(logits, fx.Node)
    assert isinstance(target, fx.Node)
    cut = logits.meta["placement"]
    over_classes = is_over_classes(context.staged.placements, context.staged.program.node(pick.node), pick)
    is_mine = context.tp.rank == 0 or (cut.is_sharded and not over_classes)  # rows that are cut are this rank's own
    handle = axis_node(stage, context.tp) if over_classes else None
    with stage.graph.inserting_before(reader):
        places = places_of(stage, labels, target)
        value = torch.empty((3, *labels.meta["val"].shape), dtype=torch.float64, device="meta")
        given = (logits, target, places, labels, handle, pick.class_dim, pick.num_classes, pick.ignored, is_mine)
        return call(stage, reader, scores_of_targets, given, value)


def places_of(stage: StageGraph, labels: fx.Node, looked_up: fx.Node) -> fx.Node:
    """The node of the targets' places, computed by the same calls as the targets."""

    def emit(like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        target = part_of_places if target in PARTS else target
        return call(stage, like, target, args, like.meta["val"], kwargs)

    source = call(stage, labels, own_places, (labels,), labels.meta["val"])
    return PlaceWriter(lambda node: source if node is labels else None, emit, MOVES).places(looked_up)


def call(
    stage: StageGraph,
    like: fx.Node,
    function: Any,
    args: tuple[Any, ...],
    value: Any,
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    new = stage.graph.call_function(function, args, kwargs or {})
    new.meta = {k: v for k, v in like.meta.items() if k in ("origin", "nn_module_stack", "stack_trace")}
    new.meta |= {"val": value, "grad": False, "placement": like.meta["placement"]}
    return new
