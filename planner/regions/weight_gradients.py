"""How the gradient of each weight is made: by the product that reads it, which can wait for a W, or by autograd.

    can wait        a product of a value with the weight, or the bias added to one, outside of graph regions
    in graph        the same within a region: a graph replays it with its backward
    at once         the same outside of one, on a value in a graph's static memory: the next microbatch takes it after
                    the backward: a W would read the wrong values
    by autograd     whatever else reads a weight: norms, lookups, products with a weight that was cast or cut before

A weight that is read in several ways has an entry for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from passes.program.ops.aten import packet_of
from passes.program.ops.groups import WITH_WEIGHT
from passes.regions import Region, homes, lies_in_a_graph
from planner.decisions import Decisions
from planner.saved.fused import is_fused_bias

aten = torch.ops.aten
CAN_WAIT, IN_GRAPH, AT_ONCE, BY_AUTOGRAD = "can wait", "in graph", "at once", "by autograd"


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """``name``: the parameter's. ``how``: one of the four; ``reason``: why autograd makes it, "" if it does not."""

    name: str
    how: str
    reason: str = ""


def weight_gradients(decisions: Decisions, regions: Sequence[Region] = ()) -> tuple[WeightGradient, ...]:
    """Of each parameter that trains, in the order of the program."""
    home = homes(regions)
    found: dict[WeightGradient, None] = {}
    for node, fqn in decisions.program.parameters.items():
        parameter = decisions.program.node(node)
        if parameter.meta.get("grad"):
            found |= dict.fromkeys(_ways(decisions, parameter, fqn, home))
    return tuple(found)


def _ways(decisions: Decisions, parameter: fx.Node, fqn: str, home: frozenset[str]) -> Iterator[WeightGradient]:
    for reader in parameter.users:
        if reader.op != "call_function":
            continue
        product = _product(decisions, parameter, reader)
        if product is None:
            yield WeightGradient(fqn, BY_AUTOGRAD, f"{packet_of(reader.target)} reads it")
        elif not product.all_input_nodes[0].meta.get("grad"):
            yield WeightGradient(fqn, BY_AUTOGRAD, f"{packet_of(product.target)} multiplies a value without a gradient")
        elif reader.name in home:
            yield WeightGradient(fqn, IN_GRAPH)
        else:
            value, stage = product.all_input_nodes[0], decisions.stages.stage_of[product.name]
            yield WeightGradient(
                fqn,
                AT_ONCE
                if lies_in_a_graph(value, stage, decisions.stages, decisions.mesh.pp_rank_of, home)
                else CAN_WAIT,
            )


def _product(decisions: Decisions, parameter: fx.Node, reader: fx.Node) -> fx.Node | None:
    """The product that has ``parameter`` as its weight or bias: ``reader`` itself, or the product to which it adds the
    bias.
    """
    if is_fused_bias(decisions, reader) and reader.args[1] is parameter:
        product = reader.all_input_nodes[0]
        weight = product.args[1]
        is_held = isinstance(weight, fx.Node) and bool(weight.meta.get("parameter"))
        return product if is_held else None
    if reader.target not in WITH_WEIGHT or reader.kwargs or reader.meta["val"].dtype.is_complex:
        return None
    return reader if len(reader.args) == 2 and reader.args[1] is parameter else None
