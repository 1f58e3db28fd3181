"""Wait for updated parameters before their first reader, bucket by bucket, not for all before the first forward.

    h = linear(x, W)   →   await_bucket(gate, buffer, bucket of W);  h = linear(x, W)

The gathers of an update start in the order in which a forward reads their buckets, and run while it computes.

Needs:   a finished graph: a wait gives no value, so dead-code elimination would drop it.
Leaves:  every read of a gathered parameter comes after the wait for its bucket.
"""

from __future__ import annotations

from torch import fx

from passes.base import LowerContext, StageGraph
from passes.ops.parameter_gate import await_bucket


def await_parameters(stage: StageGraph, context: LowerContext) -> None:
    """One wait a bucket and stage, before the first op that reads one of its parameters."""
    if context.homes:  # they are gathered in the graph (passes.gather_weights)
        return
    places, seen = buckets_of(stage, context), set[tuple[int, int]]()
    if not places:
        return
    stage.root.gate = context.gate  # pyright: ignore
    with stage.graph.inserting_before(next(iter(stage.graph.nodes))):
        gate = stage.graph.create_node("get_attr", "gate")
    for node in list(stage.graph.nodes):
        for value in node.all_input_nodes:
            place = places.get(value)
            if place is not None and place not in seen:
                seen.add(place)
                with stage.graph.inserting_before(node):
                    stage.graph.call_function(await_bucket, (gate, *place))


def buckets_of(stage: StageGraph, context: LowerContext) -> dict[fx.Node, tuple[int, int]]:
    """Each parameter of the stage that other ranks update: its node → (buffer of this pp rank, its bucket)."""
    buckets, parameters = context.buckets, context.lowering.program.parameters
    names = {attribute: parameters[name] for name, attribute in stage.parameters.items()}
    nodes = stage.graph.find_nodes(op="get_attr") if buckets else []
    return {node: buckets[names[node.target]] for node in nodes if names.get(node.target) in buckets}
