"""The collectives' rows of forward and backward: every exchange of a microbatch, in the order of the stages.

    tp   what a change of type costs (sharding.type_changes), and the scalars of a loss, softmax or norm over ranks
    pp   each value that crosses a cut, sent and received, and its gradient on the way back

``bytes`` are those of the whole tensor: the sum of an all-reduce, the result of an all-gather, the operand of a
reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import fx

from planner.decisions import Decisions
from planner.graph.places import Places
from planner.placement.rules.forms import Form
from planner.placement.rules.reduction import EXCHANGES, SOFTMAX
from planner.sharding.collectives import CollectivePlan
from planner.sharding.shards import Shards
from planner.sharding.type_changes import TypeChange

aten = torch.ops.aten


def collective_rows(decisions: Decisions, shards: Shards, places: Places) -> tuple[CollectivePlan, ...]:
    """One row for each exchange of a microbatch."""
    losses, others = parallel_losses(decisions), _over_ranks(decisions)
    rows: list[CollectivePlan] = []
    for stage in range(decisions.stages.num_stages):
        rows += _boundary_rows(decisions, shards, places, stage - 1, stage)
        for change in shards.changes[stage]:
            rows += _change_rows(decisions, change, places)
        for loss in losses:
            if decisions.stages.runs_on(loss.name, stage):
                rows += _loss_rows(loss, stage, places)
        for node in others:
            if decisions.stages.runs_on(node.name, stage):
                rows += _statistics_rows(decisions, node, stage, places)
        rows += _boundary_rows(decisions, shards, places, stage, stage)
    return tuple(rows)


def _change_rows(decisions: Decisions, change: TypeChange, places: Places) -> Iterator[CollectivePlan]:
    node = decisions.program.node(change.value)
    reader = change.readers[0]
    at = decisions.program.node(reader) if reader not in ("send", "loss") else node
    place = at if change.how.name in ("f", "gather") else node
    size = _bytes(tuple(node.meta["val"].shape), node)
    for phase, kind in (("forward", change.how.forward), ("backward", change.how.backward)):
        if kind:
            yield CollectivePlan(
                kind, "tp", phase, places.text(place), size, 1, "microbatch", change.stage, places.block(place)
            )


def parallel_losses(decisions: Decisions) -> list[fx.Node]:
    """The losses that run on logits cut over the vocabulary."""
    found = decisions.program.graph.graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default)
    return [n for n in found if decisions.placements.options[n.name].form is Form.CLASSES]


def scalars_of_loss(loss: fx.Node) -> tuple[int, ...]:
    """Scalars a token of each exchange: the maximum; then the target's logit, sum of exponentials (smoothing: Σ z)."""
    smoothing = loss.args[5] if len(loss.args) > 5 else loss.kwargs.get("label_smoothing", 0.0)
    return (1, 3) if smoothing else (1, 2)


def _loss_rows(loss: fx.Node, stage: int, places: Places) -> Iterator[CollectivePlan]:
    logits = loss.all_input_nodes[0].meta["val"]
    width = max(4, logits.element_size())
    for scalars in scalars_of_loss(loss):
        size = scalars * int(logits.shape[0]) * width
        yield CollectivePlan("all_reduce", "tp", "forward", places.text(loss), size, 1, "microbatch", stage)


def _over_ranks(decisions: Decisions) -> list[fx.Node]:
    """A softmax or a norm of the model's own along a dim that is cut."""
    options = decisions.placements.options
    return [decisions.program.node(name) for name, option in options.items() if option.form is Form.OVER_RANKS]


def _statistics_rows(decisions: Decisions, node: fx.Node, stage: int, places: Places) -> Iterator[CollectivePlan]:
    """What the ranks exchange of each row of the cut dim: maximum and sum of exponentials, or mean and mean square."""
    cut, x = decisions.placements.wanted(node, 0), node.all_input_nodes[0].meta["val"]
    dtype = node.meta["val"].dtype if node.target in SOFTMAX else x.dtype
    size = x.numel() // int(x.shape[cut.dim]) * max(4, dtype.itemsize)
    forward, backward = EXCHANGES[node.target]
    for phase in ["forward"] * forward + ["backward"] * (backward if node.meta["grad"] else 0):
        yield CollectivePlan(
            "all_reduce", "tp", phase, places.text(node), size, 1, "microbatch", stage, places.block(node)
        )


def _boundary_rows(
    decisions: Decisions, shards: Shards, places: Places, cut: int, stage: int
) -> Iterator[CollectivePlan]:
    """What ``stage`` sends or receives at ``cut``; chunks of one rank hand their values over without a message."""
    if cut < 0 or cut % decisions.mesh.pp == (cut + 1) % decisions.mesh.pp:
        return
    sends = cut == stage
    for value in shards.boundaries[cut]:
        node = decisions.program.node(value.name)
        for phase in ("forward", "backward") if value.requires_grad else ("forward",):
            kind = "send" if sends == (phase == "forward") else "recv"
            yield CollectivePlan(
                kind, "pp", phase, places.text(node), value.bytes, 1, "microbatch", stage, places.block(node)
            )


def _bytes(shape: tuple[int, ...], node: fx.Node) -> int:
    return prod(shape) * node.meta["val"].element_size()
