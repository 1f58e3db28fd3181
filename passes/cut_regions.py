"""Each region that a CUDA graph captures becomes one call of a graph of its own.

    h = norm(x); q = linear(h, W) … o = linear(a, V)   →   (o,) = run_region(region_3, [x], [W, V])

Values that cross are the inputs and outputs of the plan; parameters, buffers and handles are passed in without a copy.

Needs:   a finished graph, its nodes with ``meta["origin"]``, its collectives with ``meta["change"]``.
Leaves:  one call for each captured region of the stage; everything else in its old order.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from passes.base import LowerContext, StageGraph
from passes.ops.region import RegionCall, run_region
from passes.program.stages import BoundaryPlan
from passes.regions import Region, home_of
from passes.types.types import Placement
from passes.units import in_order, module_of


def cut_regions(stage: StageGraph, context: LowerContext) -> None:
    """One call a region, as early as its inputs allow."""
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
    for unit in in_order(stage.graph, place, members):
        if isinstance(unit, fx.Node):
            env[unit] = graph.node_copy(unit, lambda n: env[n])
        else:
            _call(stage.root, graph, regions[unit], members[unit], env)
    stage.env = {name: env[node] for name, node in stage.env.items() if node in env}
    stage.graph = graph


def owners(stage: StageGraph, context: LowerContext) -> dict[str, Region]:
    """Captured name → the region of this stage that holds it."""
    mine = [r for r in context.regions if r.stage == stage.index and not r.refused]
    return {name: region for region in mine for name in sorted(region.nodes)}


def region_of(node: fx.Node, owner: dict[str, Region]) -> Region | None:
    """The region of a node of the lowered graph; None outside of all regions."""
    if node.op != "call_function":
        return None
    change = node.meta.get("change")
    return owner.get(node.meta.get("origin", "")) if change is None else home_of(change, owner)


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
        module_of(members, [*given, *held], left),
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


def _planned(listed: dict[Any, BoundaryPlan], node: fx.Node) -> BoundaryPlan:
    assert _key(node) in listed, f"{node.name} crosses the border of a region, and the plan does not list it"
    return listed[_key(node)]


def _key(node: fx.Node) -> tuple[str, Placement]:
    """The captured name of a value, and the type in which it is here."""
    change = node.meta.get("change")
    return node.meta["origin"] if change is None else change.value, node.meta["placement"]
