"""The collectives' rows of forward and backward: every exchange of a microbatch, in the order of the stages.

    tp   what a change of type costs (sharding.type_changes), and the scalars of a loss, softmax or norm over ranks
    ep   rows on their way to experts and back (rows_of_experts); etp: the same, and changes of type among experts
    cp   keys and values gathered along the sequence, and sums over it (planner.exchanges.sequence)
    pp   each value that crosses a cut, sent and received, and its gradient on the way back

``bytes`` are those of the full tensor: the sum of an all-reduce, the result of an all-gather, the operand of a
reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, prod

import torch
from torch import fx

from passes.blocks.places import Places
from passes.moe.domain import axis_of, in_domain, is_here, share_of_rows
from passes.partition.options.forms import Form
from passes.partition.options.reduction import EXCHANGES
from passes.partition.type_changes import TypeChange
from passes.pieces import Piece
from passes.program.ops.groups import EXTREMES, LOG_SOFTMAXES, SOFTMAXES
from passes.program.ops.over_data import over_data
from passes.types.collectives import CollectivePlan
from planner.decisions import Decisions
from planner.exchanges.rows_of_experts import exchange_rows, exchanges_of, is_exchange
from planner.exchanges.sequence import sequence_exchanges, sequence_rows
from planner.sharding.shards import Shards

aten = torch.ops.aten


def collective_rows(
    decisions: Decisions, shards: Shards, places: Places, recomputed: Sequence[Piece] = ()
) -> tuple[CollectivePlan, ...]:
    """One row for each exchange of a microbatch."""
    losses, others, moved = parallel_losses(decisions), _over_ranks(decisions), exchanges_of(decisions)
    of_sequence = sequence_exchanges(decisions)
    rows: list[CollectivePlan] = []
    over_ranks = decisions.program.graph.graph.find_nodes(op="call_function", target=over_data)
    for stage in range(decisions.stages.num_stages):
        rows += _boundary_rows(decisions, shards, places, stage - 1, stage)
        for change in shards.changes[stage]:
            if not is_here(decisions.program.node(change.value), decisions.mesh, 0):
                continue  # ranks of other experts do the same with theirs
            rows += change_rows(decisions, change, places)
        for loss in losses:
            if decisions.stages.runs_on(loss.name, stage):
                rows += _loss_rows(loss, stage, places)
        for node in moved:
            if decisions.stages.runs_on(node.name, stage):
                rows += exchange_rows(decisions, node, stage, places)
        for node in of_sequence:
            if decisions.stages.runs_on(node.name, stage):
                rows += sequence_rows(decisions, node, stage, places)
        for node in over_ranks:
            if decisions.stages.runs_on(node.name, stage):
                rows += _data_rows(decisions, node, stage, places)
        for node in others:
            if decisions.stages.runs_on(node.name, stage) and is_here(node, decisions.mesh, 0):
                rows += _statistics_rows(decisions, node, stage, places)
        for piece in recomputed:
            if piece.stage == stage:
                rows += _again_rows(decisions, piece, places)
        rows += _boundary_rows(decisions, shards, places, stage, stage)
    return tuple(rows)


def rows_of_call(decisions: Decisions, node: fx.Node, stage: int, places: Places) -> Iterator[CollectivePlan]:
    """The collectives of ``node``'s own call on ``stage``, in both directions."""
    form = decisions.placements.options[node.name].form if node.name in decisions.placements.options else None
    if node.target is aten.cross_entropy_loss.default and form is Form.CLASSES:
        yield from _loss_rows(node, stage, places)
    elif is_exchange(node):
        yield from exchange_rows(decisions, node, stage, places)
    elif any(exchange.node == node.name for exchange in decisions.context.exchanges):
        yield from sequence_rows(decisions, node, stage, places)
    elif node.target is over_data:
        yield from _data_rows(decisions, node, stage, places)
    elif form is Form.OVER_RANKS:
        yield from _statistics_rows(decisions, node, stage, places)


def _again_rows(decisions: Decisions, piece: Piece, places: Places) -> Iterator[CollectivePlan]:
    """The collectives of a rerun: those of its forward, in the backward."""
    for call in piece.again:
        rows: Iterator[CollectivePlan] = iter(())
        if call.changed is not None:
            rows = change_rows(decisions, call.changed, places)
        elif decisions.placements.options[call.name].form is Form.OVER_RANKS:
            rows = _statistics_rows(decisions, decisions.program.node(call.name), piece.stage, places)
        yield from (replace(row, phase="backward", again=True) for row in rows if row.phase == "forward")


def change_rows(decisions: Decisions, change: TypeChange, places: Places) -> Iterator[CollectivePlan]:
    node = decisions.program.node(change.value)
    reader = change.readers[0]
    at = decisions.program.node(reader) if reader not in ("send", "loss") else node
    place = at if change.how.name in ("f", "gather") else node
    cut = change.before if change.before.is_sharded else change.after
    shape = in_domain(node, cut.padded_shape(tuple(node.meta["val"].shape)), decisions.mesh)
    size = ceil(_bytes(shape, node) * share_of_rows(node, decisions.mesh))
    for phase, kind in (("forward", change.how.forward), *(("backward", kind) for kind in change.backward)):
        if kind:
            yield CollectivePlan(
                kind, change.axis, phase, places.text(place), size, 1, "microbatch", change.stage, places.block(place)
            )


def _data_rows(decisions: Decisions, node: fx.Node, stage: int, places: Places) -> Iterator[CollectivePlan]:
    """A part of the loss that is no sum over the batch, and its gradient, over the ranks of the other microbatches."""
    size = _bytes(tuple(node.meta["val"].shape), node)
    for phase in ("forward", "backward") if node.meta["grad"] else ("forward",):
        yield CollectivePlan(
            "all_reduce", decisions.mesh.data_axis, phase, places.text(node), size, 1, "microbatch", stage
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
    """The statistics that ranks exchange for each row of the sharded dim: maximum and sum of exponentials, or mean and
    mean square.
    """
    cut, x = decisions.placements.wanted(node, 0), node.all_input_nodes[0]
    dtype = node.meta["val"].dtype if node.target in SOFTMAXES | LOG_SOFTMAXES else x.meta["val"].dtype
    counted = node if node.meta["val"].shape != x.meta["val"].shape else x
    shape = in_domain(counted, tuple(counted.meta["val"].shape), decisions.mesh)
    width = 1 if counted is node else shape[cut.dim]
    rows = ceil(prod(shape) // width * share_of_rows(node, decisions.mesh))
    size = rows * (dtype.itemsize if node.target in EXTREMES else max(4, dtype.itemsize))
    forward, backward = EXCHANGES[node.target]
    for phase in ["forward"] * forward + ["backward"] * (backward if node.meta["grad"] else 0):
        yield CollectivePlan(
            "all_reduce", axis_of(node), phase, places.text(node), size, 1, "microbatch", stage, places.block(node)
        )


def _boundary_rows(
    decisions: Decisions, shards: Shards, places: Places, cut: int, stage: int
) -> Iterator[CollectivePlan]:
    """The messages that ``stage`` sends or receives at ``cut``; chunks of one rank hand their values over without a
    message.
    """
    if cut < 0 or decisions.mesh.pp_rank_of(cut) == decisions.mesh.pp_rank_of(cut + 1):
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
