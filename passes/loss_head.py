"""Let the stage of the loss return, beside the loss or in its place, what its logits say of the labels of the batch.

    scores, row    return loss  →  return loss_head(logits, target, places, labels, …), loss
    log_p          return loss  →  return g(loss_head(logits, target, places, labels, …), cp)

The logits are those that the loss reads, as it reads them: sharded over the vocabulary, or complete. ``places`` are
computed by the same calls as the targets, of places instead of labels: so a label's score gets the label's place.

Log-probabilities take the place of the loss, for training with a loss outside the model. They are complete on every
rank: ranks that hold other tokens add theirs. The gradient that comes back is the same on these ranks, and each takes
the part of its own tokens: nothing is exchanged in the backward.

Needs:   a localised graph (passes.localize).
Leaves:  collectives are those of the plan, and of scores or next tokens (tests/tools/score_jobs.py); for log_p no
         op that only the loss reads.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import fx

from passes.base import LowerContext, StageGraph
from passes.ops import collectives, context, loss_head
from passes.ops.loss_head import LOG_P, ROW, Wanted, own_places, part_of_places
from passes.partition.loss.scored import Pick, PlaceWriter, find_scored, is_over_classes
from passes.program.builder import prune
from passes.program.ops.aten import aten
from passes.types.types import I

WANTED = "wanted"  # the attribute of the stage's module
PARTS = (collectives.slice_part, collectives.cut_part)
MOVES = (context.local_rows, *PARTS)


def add_loss_head(want: str) -> Callable[[StageGraph, LowerContext], None]:
    """Return the pass by which the stage of the loss returns ``want``, one of passes.ops.loss_head."""

    def add_head(stage: StageGraph, context: LowerContext) -> None:
        """Write a call for each look-up of targets; results add up, as each is zero at labels without a target."""
        if not stage.has_loss:
            return
        program = context.lowering.program
        scored, output = find_scored(program), stage.graph.output_node()
        (name,) = (name for name, key in program.inputs.items() if key == scored.key)
        parts = [_head(stage, context, stage.env[name], pick, want) for pick in scored.picks]
        with stage.graph.inserting_before(output):
            whole = reduce(lambda a, b: _summed(stage, a, aten.add.Tensor, b), parts)
            if want == LOG_P and "cp" in context.axes:
                whole = _summed(stage, whole, collectives.g, stage.axis(context.axes["cp"]))
        *sent, loss = output.args[0]  # pyright: ignore[reportGeneralTypeIssues]
        *names, of_loss = output.meta["names"]
        if want == LOG_P:
            output.args, output.meta["names"] = ((*sent, whole),), (*names, "log_probs")
            prune(stage.graph)
            stage.env = {name: node for name, node in stage.env.items() if node in set(stage.graph.nodes)}
        else:
            output.args, output.meta["names"] = ((*sent, whole, loss),), (*names, "scores", of_loss)
            stage.has_scores = True

    return add_head


def _head(stage: StageGraph, context: LowerContext, labels: fx.Node, pick: Pick, want: str) -> fx.Node:
    reader, tp = stage.env[pick.node], context.tp
    args: Any = reader.args
    logits, target = args[0], args[pick.target]
    over_classes = is_over_classes(context.lowering.placements, context.lowering.program.node(pick.node), pick)
    axis = stage.axis(tp) if over_classes else None
    are_rows_cut = logits.meta["placement"].is_sharded and not over_classes  # each rank has those of its own tokens
    wanted = (stage.handle(WANTED, Wanted(context.random)),) if want == ROW else ()
    classes, shape = (pick.class_dim, pick.num_classes, pick.ignored), labels.meta["val"].shape
    shapes = {LOG_P: (shape, torch.float64), ROW: ((shape[0], pick.num_classes + 1), torch.float32)}
    shape, dtype = shapes.get(want, ((3, *shape), torch.float64))
    with stage.graph.inserting_before(reader):
        given = (logits, target, _places_of(stage, labels, target), labels, axis, classes, want)
        value = torch.empty(shape, dtype=dtype, device="meta")
        found = stage.call(reader, loss_head.loss_head, (*given, tp.rank == 0 or are_rows_cut, *wanted), value)
        if want == LOG_P:
            found.meta |= {"grad": True, "placement": I}
            return _summed(stage, found, collectives.g, stage.axis(tp)) if are_rows_cut else found
        return found


def _summed(stage: StageGraph, value: fx.Node, function: Any, other: fx.Node) -> fx.Node:
    """Add ``other``, or sum over ranks that hold other tokens."""
    new = stage.call(value, function, (value, other), value.meta["val"])
    new.meta["grad"] = value.meta["grad"]
    return new


def _places_of(stage: StageGraph, labels: fx.Node, target: fx.Node) -> fx.Node:
    """Return the node of the targets' places, computed by the same calls as the targets."""

    def emit(like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        target = part_of_places if target in PARTS else target
        return stage.call(like, target, args, like.meta["val"], kwargs)

    source = stage.call(labels, own_places, (labels,), labels.meta["val"])
    return PlaceWriter(lambda node: source if node is labels else None, emit, MOVES).places(target)
