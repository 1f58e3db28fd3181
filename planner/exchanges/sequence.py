"""The collectives' rows of cp: the gathers of a sequence, and the sums of its parts.

    gather_sequence    all-gather, and a reduce-scatter of the gradient      bytes of all tokens
                       and an all-gather in the backward, if the gathered value is not saved
    sum_over_ranks     all-reduce in both directions
    gathered_attention as gather_sequence, of keys and values together; the backward gathers them again

``bytes`` are those of one rank of tp: of its own heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from torch import fx

from passes.blocks.places import Places
from passes.program.ops.aten import shape_of
from passes.program.ops.sequence import gather_sequence, gathered_attention
from passes.types.collectives import CollectivePlan
from passes.types.conversions import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from planner.decisions import Decisions


def sequence_exchanges(decisions: Decisions) -> list[fx.Node]:
    """The calls that communicate over cp, in the graph's order."""
    return [decisions.program.node(exchange.node) for exchange in decisions.context.exchanges]


def sequence_rows(decisions: Decisions, node: fx.Node, stage: int, places: Places) -> Iterator[CollectivePlan]:
    """The collectives of one of them, in both directions."""
    if node.target is gathered_attention:
        yield from _attention_rows(decisions, node, stage, places)
        return
    gathers = node.target is gather_sequence
    kinds = [("forward", ALL_GATHER if gathers else ALL_REDUCE)]
    if node.name in decisions.context.gathered_again:
        kinds.append(("backward", ALL_GATHER))
    if node.meta["grad"]:
        kinds.append(("backward", REDUCE_SCATTER if gathers else ALL_REDUCE))
    shape = decisions.placements.of(node).local_shape(shape_of(node), decisions.placements.tp)
    size = prod(shape) * node.meta["val"].element_size()
    for phase, kind in kinds:
        yield CollectivePlan(kind, "cp", phase, places.text(node), size, 1, "microbatch", stage, places.block(node))


def _attention_rows(decisions: Decisions, node: fx.Node, stage: int, places: Places) -> Iterator[CollectivePlan]:
    cp = int(node.args[4])  # pyright: ignore[reportArgumentType]
    phases = [("forward", ALL_GATHER), ("backward", ALL_GATHER), ("backward", REDUCE_SCATTER)]
    size = sum(cp * _bytes(decisions, node, n) for n in node.args[1:3] if isinstance(n, fx.Node))
    for phase, kind in phases if node.meta["grad"] else phases[:1]:
        yield CollectivePlan(kind, "cp", phase, places.text(node), size, 1, "microbatch", stage, places.block(node))


def _bytes(decisions: Decisions, node: fx.Node, operand: fx.Node) -> int:
    """Of keys or values that one rank has before they are gathered."""
    wanted = decisions.placements.wanted(node, node.all_input_nodes.index(operand))
    shape = wanted.local_shape(shape_of(operand), decisions.placements.tp)
    return prod(shape) * operand.meta["val"].element_size()
