"""Each region that a CUDA graph captures becomes one call of a graph of its own.

    h = norm(x); q = linear(h, W) … o = linear(a, V)   →   (o,) = run_region(region_3, [x], [W, V])

Values that cross are the inputs and outputs of the plan; parameters, buffers and handles are handed in where they lie.

Needs:   a finished graph, its nodes with ``meta["origin"]``, its collectives with ``meta["change"]``.
Leaves:  one call for each captured region of the stage; everything else in its old order.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from passes.base import LowerContext, StageGraph
from passes.ops.region import RegionCall, run_region
from planner.placement.types import Placement
from planner.regions.regions import Region, home_of
from planner.sharding.boundaries import BoundaryPlan


def cut_regions(stage: StageGraph, context: LowerContext) -> None:
    """One call a region, as early as what it reads allows."""
    owner = owners(stage, context)
    if not owner:
        return
    members: dict[int, list[fx.Node]] = {}
    place: dict[fx.Node, int] = {}
    for node in stage.graph.nodes:
        region = region_of(node, owner)
        if region is not None:
            members.setdefault(region.index, []).append(node)
            place[node] = region.index
    regions = {region.index: region for region in owner.values()}
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for unit in _in_order(stage.graph, place, members):
        if isinstance(unit, fx.Node):
            env[unit] = graph.node_copy(unit, lambda n: env[n])
        else:
            _call(stage.root, graph, regions[unit], members[unit], env)
    stage.env = {name: env[node] for name, node in stage.env.items() if node in env}
    stage.graph = graph


def owners(stage: StageGraph, context: LowerContext) -> dict[str, Region]:
    """Captured name → the region of this stage that holds it."""
    mine = [r for r in context.regions if r.stage == stage.index and not r.refused]
    return {name: region for region in mine for name in region.nodes}


def region_of(node: fx.Node, owner: dict[str, Region]) -> Region | None:
    """Where a node of the lowered graph runs; None outside of all regions."""
    if node.op != "call_function":
        return None
    change = node.meta.get("change")
    return owner.get(node.meta.get("origin", "")) if change is None else home_of(change, owner)


def _in_order(graph: fx.Graph, place: dict[fx.Node, int], members: dict[int, list[fx.Node]]) -> list[fx.Node | int]:
    """Nodes and regions, each after what it reads; of those that may come next, the one that began first."""
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
    assert len(order) == len(waiting), "a region reads what is made of its own values outside of it"
    return order


def _call(
    root: nn.Module, graph: fx.Graph, region: Region, members: Sequence[fx.Node], env: dict[fx.Node, fx.Node]
) -> None:
    inside = set(members)
    read = dict.fromkeys(v for node in members for v in node.all_input_nodes if v not in inside)
    held = [v for v in read if v.op == "get_attr"]
    given = [v for v in read if v.op != "get_attr"]
    left = [node for node in members if any(user not in inside for user in node.users)]
    through = [i for i, v in enumerate(given) if _key(v) in region.through]
    call = RegionCall(
        region.index,
        _module(members, [*given, *held], left),
        [_planned(region.inputs, v) for v in given],
        [_planned(region.outputs, v) for v in left],
        through,
    )
    name = f"region_{region.index}"
    setattr(root, name, call)
    handle = graph.create_node("get_attr", name)
    result = graph.call_function(run_region, (handle, [env[v] for v in given], [env[v] for v in held]))
    for position, node in enumerate([*left, *(given[i] for i in through)]):  # whoever comes later reads it from here
        env[node] = graph.call_function(operator.getitem, (result, position))
        env[node].meta = dict(node.meta)


def _module(members: Sequence[fx.Node], read: Sequence[fx.Node], left: Sequence[fx.Node]) -> fx.GraphModule:
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in read:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in members:
        env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[node] for node in left))
    return fx.GraphModule(nn.Module(), graph)


def _planned(listed: dict[Any, BoundaryPlan], node: fx.Node) -> BoundaryPlan:
    assert _key(node) in listed, f"{node.name} crosses the border of a region, and the plan does not list it"
    return listed[_key(node)]


def _key(node: fx.Node) -> tuple[str, Placement]:
    """The captured name of a value, and the type in which it is here."""
    change = node.meta.get("change")
    return node.meta["origin"] if change is None else change.value, node.meta["placement"]
