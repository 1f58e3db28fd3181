"""Parts of a graph that become one call each: their order, the graph of one of them, and their places."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from passes.ops.region import RegionCall, run_region


def in_order(graph: fx.Graph, place: dict[fx.Node, int], members: dict[int, list[fx.Node]]) -> list[fx.Node | int]:
    """Nodes and parts (by number), each after its inputs; of those that may come next, the one that began first.

    ``place``: node → its part. ``members``: part → its nodes.
    """
    nodes = list(graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    unit_of: dict[fx.Node, Any] = {node: place.get(node, node) for node in nodes}
    inner = {unit: members[unit] if isinstance(unit, int) else [unit] for unit in dict.fromkeys(unit_of.values())}
    reads = {unit: {unit_of[v] for n in held for v in n.all_input_nodes} - {unit} for unit, held in inner.items()}
    readers: dict[fx.Node | int, list[fx.Node | int]] = {}
    for unit, operands in reads.items():
        for operand in operands:
            readers.setdefault(operand, []).append(unit)
    rank = {unit: index[held[0]] for unit, held in inner.items()}
    by_rank = {i: unit for unit, i in rank.items()}
    waiting = {unit: len(operands) for unit, operands in reads.items()}
    ready = [rank[unit] for unit, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[fx.Node | int] = []
    while ready:
        unit = by_rank[heapq.heappop(ready)]
        order.append(unit)
        for reader in readers.get(unit, ()):
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, rank[reader])
    assert len(order) == len(waiting), "a part reads a value computed outside it from its own results"
    return order


def module_of(members: Sequence[fx.Node], read: Sequence[fx.Node], left: Sequence[fx.Node]) -> fx.GraphModule:
    """A graph of copies of ``members``: arguments ``read``, results ``left``."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in read:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in members:
        env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[node] for node in left))
    return fx.GraphModule(nn.Module(), graph)


def regions_in(graph: fx.Graph, root: nn.Module) -> list[RegionCall]:
    """The captured parts of a stage, each with a graph of its own."""
    return [getattr(root, node.args[0].target) for node in graph.find_nodes(op="call_function", target=run_region)]


def comes_of_region(node: fx.Node) -> bool:
    """Whether a node is the call of a captured part, or one of the values that it gives."""
    made = node.all_input_nodes[0] if node.target is operator.getitem else node
    return made.target is run_region
