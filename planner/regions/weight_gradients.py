"""How the gradient of each weight is made: by the product that reads it, which can wait for a W, or by autograd.

    can wait        a product of a value with the weight, with its bias, outside of graph regions
    in graph        the same within a region: a graph replays it with its backward
    at once         the same outside of one, on a value in a graph's static memory: the next microbatch takes it after
                    the backward: a W would read the wrong values
    by autograd     whatever else reads a weight: norms, lookups, products with a weight that was cast or cut before

It is read off the lowered stages. A weight that is read in several ways has an entry for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from passes.base import StageGraph, ops_of
from passes.ops.weight_gradients import AtOnce
from passes.own_linears import PRODUCTS
from passes.program.ops.aten import packet_of
from passes.regions import homes
from planner.decisions import Decisions
from planner.saved.lowered import Lowered

CAN_WAIT, IN_GRAPH, AT_ONCE, BY_AUTOGRAD = "can wait", "in graph", "at once", "by autograd"


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """``name``: the parameter's. ``how``: one of the four; ``reason``: why autograd makes it, "" if it does not."""

    name: str
    how: str
    reason: str = ""


def weight_gradients(lowered: Lowered) -> tuple[WeightGradient, ...]:
    """Of each parameter that trains, in the order of the program."""
    decisions, home = lowered.decisions, homes(lowered.regions)
    found: dict[str, dict[WeightGradient, None]] = {}
    for stage in map(lowered.stage, range(lowered.num_stages)):
        for node in stage.graph.find_nodes(op="get_attr"):
            name = decisions.program.parameters.get(node.meta.get("origin", ""))
            if name is not None and node.meta["grad"]:
                found.setdefault(name, {}).update(dict.fromkeys(_ways(decisions, stage, node, name, home)))
    return tuple(row for name in decisions.program.parameters.values() for row in found.get(name, ()))


def _ways(
    decisions: Decisions, stage: StageGraph, parameter: fx.Node, name: str, home: frozenset[str]
) -> Iterator[WeightGradient]:
    for reader in parameter.users:
        names = ops_of(reader) or reader.meta["change"].readers
        target = packet_of(decisions.program.node(names[0]).target) if names[0] not in ("send", "loss") else names[0]
        if reader.target not in PRODUCTS:
            yield WeightGradient(name, BY_AUTOGRAD, f"{target} reads it")
        elif not reader.all_input_nodes[0].meta.get("grad"):
            yield WeightGradient(name, BY_AUTOGRAD, f"{target} multiplies a value without a gradient")
        elif not home.isdisjoint(names):
            yield WeightGradient(name, IN_GRAPH)
        else:
            handle = getattr(stage.root, str(reader.args[-1].target))  # pyright: ignore
            yield WeightGradient(name, AT_ONCE if isinstance(handle, AtOnce) else CAN_WAIT)
