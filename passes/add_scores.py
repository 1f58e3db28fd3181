"""Let the stage of the loss return, beside the loss, how probable each label of the batch is to the model.

    return loss      →      return scores_of_targets(logits, target, places, labels, …), loss

The logits are those that the loss reads, as it reads them: sharded over the vocabulary, or complete. ``places`` are
computed by the same calls as the targets, of places instead of labels: so a label's score gets the label's place.

Needs:   a localised graph (passes.localize).
Leaves:  collectives are those of the plan and of planner.exchanges.scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx

from passes.base import LowerContext, StageGraph
from passes.insert_collectives import axis_node
from passes.ops import collectives, context
from passes.ops.scores import own_places, part_of_places, scores_of_targets
from passes.partition.loss.scored import Pick, find_scored, is_over_classes
from passes.program.ops.places import PlaceWriter

aten = torch.ops.aten
PARTS = (collectives.slice_part, collectives.cut_part)
MOVES = (context.local_rows, *PARTS)


def add_scores(stage: StageGraph, context: LowerContext) -> None:
    """One call for each look-up of targets; their results add up, as each is zero at labels without a target."""
    labels, picks = looked_up(stage, context)
    return_beside_loss(stage, labels, [_scores(stage, context, labels, pick) for pick in picks])


def looked_up(stage: StageGraph, context: LowerContext) -> tuple[fx.Node, tuple[Pick, ...]]:
    """The labels of the batch, and where the loss looks up what is made of them."""
    program = context.lowering.program
    scored = find_scored(program)
    (name,) = (name for name, key in program.inputs.items() if key == scored.key)
    return stage.env[name], scored.picks


def return_beside_loss(stage: StageGraph, labels: fx.Node, parts: Sequence[fx.Node]) -> None:
    """The sum of ``parts`` becomes a result of the stage, before the loss."""
    output = stage.graph.output_node()
    with stage.graph.inserting_before(output):
        whole = reduce(lambda a, b: call(stage, labels, aten.add.Tensor, (a, b), parts[0].meta["val"]), parts)
    *sent, loss = output.args[0]  # pyright: ignore[reportGeneralTypeIssues]
    output.args = ((*sent, whole, loss),)
    output.meta["names"] = (*output.meta["names"][:-1], "scores", output.meta["names"][-1])
    stage.has_scores = True


@dataclass(frozen=True, slots=True)
class LookUp:
    """Of one pick in a stage. ``handle``: of tp, if logits are sharded over the classes. ``are_rows_cut``: each rank
    has the rows of its own tokens.
    """

    reader: fx.Node
    logits: fx.Node
    target: fx.Node
    handle: fx.Node | None
    are_rows_cut: bool


def look_up_of(stage: StageGraph, context: LowerContext, pick: Pick) -> LookUp:
    reader = stage.env[pick.node]
    logits, target = reader.args[0], reader.args[pick.target]
    assert isinstance(logits, fx.Node)
    assert isinstance(target, fx.Node)
    over_classes = is_over_classes(context.lowering.placements, context.lowering.program.node(pick.node), pick)
    handle = axis_node(stage, context.tp) if over_classes else None
    return LookUp(reader, logits, target, handle, logits.meta["placement"].is_sharded and not over_classes)


def _scores(stage: StageGraph, context: LowerContext, labels: fx.Node, pick: Pick) -> fx.Node:
    of = look_up_of(stage, context, pick)
    is_mine = context.tp.rank == 0 or of.are_rows_cut
    with stage.graph.inserting_before(of.reader):
        places = places_of(stage, labels, of.target)
        value = torch.empty((3, *labels.meta["val"].shape), dtype=torch.float64, device="meta")
        sizes = (pick.class_dim, pick.num_classes, pick.ignored, is_mine)
        given = (of.logits, of.target, places, labels, of.handle, *sizes)
        return call(stage, of.reader, scores_of_targets, given, value)


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
    """A new call at the origin of ``like``; ``value``: a tensor as its result is."""
    new = stage.graph.call_function(function, args, kwargs or {})
    new.meta = {k: v for k, v in like.meta.items() if k in ("origin", "nn_module_stack", "stack_trace")}
    new.meta |= {"val": value, "grad": False, "placement": like.meta["placement"]}
    return new
