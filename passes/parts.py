"""Parts of a stage become one call each, of a graph of their own: regions that a CUDA graph captures, and pieces for
which the runtime compiles a function.

    h = norm(x); q = linear(h, W) … o = linear(a, V)   →   (o,) = run_region(region_3, [x], [W, V])

    y = add(x, h); n = layer_norm(y, w, b)             →   (y, n) = run_piece(piece_3, [x, h, w, b])

Values that cross a region are the inputs and outputs of the plan; parameters, buffers and handles are passed in without
a copy. Parameters are arguments of a piece, so that all copies of a block share one function.

Needs:   a finished graph, its nodes with ``meta["origin"]``, its collectives with ``meta["change"]``.
Leaves:  one call for each captured region and piece of the stage; everything else in its old order.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from passes.base import LowerContext, StageGraph, text_of
from passes.moe.domain import counts_rows
from passes.ops.region import CompiledCall, RegionCall, run_piece, run_region
from passes.pieces import CompiledPiece, Region, home_of, regions_on
from passes.program.program import BoundaryPlan
from passes.program.source_lines import where_of
from passes.program.walks import in_turn
from passes.types.types import Placement

Env = dict[fx.Node, fx.Node]


def cut_regions(stage: StageGraph, context: LowerContext) -> None:
    """Make one call of each region, as early as its inputs allow."""
    owner = regions_on(stage.index, context.regions)
    if not owner:
        return
    members: dict[int, list[fx.Node]] = {}
    for node in stage.graph.nodes:
        region = region_of(node, owner)
        if region is not None:
            members.setdefault(region.index, []).append(node)
    regions = {region.index: region for region in owner.values()}
    env = _with_calls(
        stage.graph, members, lambda new, i, env: _call_region(stage.root, new, regions[i], members[i], env)
    )
    stage.env = {name: env[node] for name, node in stage.env.items() if node in env}
    stage.graph = next(iter(env.values())).graph


def region_of(node: fx.Node, owner: dict[str, Region]) -> Region | None:
    """Return the region of a node of the lowered graph; None outside of all regions."""
    if node.op != "call_function":
        return None
    change = node.meta.get("change")
    return owner.get(node.meta.get("origin", "")) if change is None else home_of(change, owner)


def _call_region(root: nn.Module, graph: fx.Graph, region: Region, members: Sequence[fx.Node], env: Env) -> None:
    inside = set(members)
    read = dict.fromkeys(v for node in members for v in node.all_input_nodes if v not in inside)
    held = [v for v in read if v.op == "get_attr"]
    given = [v for v in read if v.op != "get_attr"]
    left = [node for node in members if any(user not in inside for user in node.users)]
    through = [i for i, v in enumerate(given) if key_of_value(v) in region.through]
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
    assert key_of_value(node) in listed, f"{node.name} crosses the border of a region, and the plan does not list it"
    return listed[key_of_value(node)]


def key_of_value(node: fx.Node) -> tuple[str, Placement]:
    """Return the captured name of a value, and the type in which it is here."""
    change = node.meta.get("change")
    return node.meta["origin"] if change is None else change.value, node.meta["placement"]


def compile_pieces(stage: StageGraph, context: LowerContext) -> None:
    """Make one call of each piece, as early as its inputs allow, in the graph that holds it: the stage's, or a
    region's."""
    mine = {piece.index: piece for piece in context.pieces if piece.stage == stage.index}
    if not mine:
        return
    env = _rewritten(stage.graph, stage.root, mine)
    stage.graph = next(iter(env.values())).graph
    stage.env = {name: env[node] for name, node in stage.env.items() if node in env}
    for region in regions_in(stage.graph, stage.root):
        inner = _rewritten(region.module.graph, region.module, mine)
        region.module.graph = next(iter(inner.values())).graph


def calls_in(graph: fx.Graph, root: nn.Module) -> list[CompiledCall]:
    """Return the pieces of a stage, also of those in captured regions."""
    graphs = [(graph, root), *((region.module.graph, region.module) for region in regions_in(graph, root))]
    marks = ((graph.find_nodes(op="call_function", target=run_piece), root) for graph, root in graphs)
    return [getattr(root, node.args[0].target) for nodes, root in marks for node in nodes]


def _rewritten(graph: fx.Graph, root: nn.Module, pieces: dict[int, CompiledPiece]) -> Env:
    """Map each node that is left to the node of the new graph."""
    owner = {name: piece.index for piece in pieces.values() for name in piece.nodes}
    members: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if _is_plain(node) and node.meta.get("origin") in owner:
            members.setdefault(owner[node.meta["origin"]], []).append(node)
    return _with_calls(graph, members, lambda new, i, env: _call_piece(root, new, pieces[i], members[i], env))


def _with_calls(graph: fx.Graph, members: dict[int, list[fx.Node]], call: Callable[[fx.Graph, int, Env], None]) -> Env:
    """Map each node that is left to that of a new graph, in which ``call`` adds a part by its number."""
    new, env = fx.Graph(), Env()
    for unit in _in_order(graph, members):
        if isinstance(unit, fx.Node):
            env[unit] = new.node_copy(unit, lambda n: env[n])
        else:
            call(new, unit, env)
    return env


def _is_plain(node: fx.Node) -> bool:
    """Return whether a node is an op as captured: no collective, no call of ours, no value that a region gives."""
    is_op = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
    return node.op == "call_function" and is_op and "change" not in node.meta and not comes_of_region(node)


def _call_piece(root: nn.Module, graph: fx.Graph, piece: CompiledPiece, members: Sequence[fx.Node], env: Env) -> None:
    inside = set(members)
    read = list(dict.fromkeys(v for node in members for v in node.all_input_nodes if v not in inside))
    last = {node.meta["origin"]: node for node in members}  # of the ops that one captured op has become
    asked = {last.get(name) for name in piece.leaves}
    is_read = {node for node in members if any(user not in inside for user in node.users)}
    left = [node for node in members if node in asked or node in is_read]
    name = f"piece_{piece.index}"
    module, structure = module_of(members, read, left), structure_of(members, read, left)
    where, rows = str(where_of(members[0])), [counts_rows(v) for v in read]
    setattr(root, name, CompiledCall(piece.index, module, structure, where, counts_rows=rows, again=piece.again))
    handle = graph.create_node("get_attr", name)
    result = graph.call_function(run_piece, (handle, [env[v] for v in read]))
    result.meta = {"origin": members[0].meta["origin"], "val": tuple(node.meta.get("val") for node in left)}
    for position, node in enumerate(left):
        if node in is_read:
            env[node] = graph.call_function(operator.getitem, (result, position))
            env[node].meta = dict(node.meta)


def structure_of(members: Sequence[fx.Node], read: Sequence[fx.Node], left: Sequence[fx.Node]) -> str:
    """The calls with their constants, values by number: a compiled function depends on these and its arguments."""
    number = {node: f"%{i}" for i, node in enumerate([*read, *members])}
    calls = [text_of(node, lambda n: number[n]) for node in members]
    return "; ".join([*calls, f"return {', '.join(number[node] for node in left)}"])


def _in_order(graph: fx.Graph, members: dict[int, list[fx.Node]]) -> list[fx.Node | int]:
    """Nodes and parts (by number), each after its inputs; of those that may come next, the one that began first."""
    nodes, place = list(graph.nodes), {node: part for part, held in members.items() for node in held}
    index = {node: i for i, node in enumerate(nodes)}
    unit_of: dict[fx.Node, Any] = {node: place.get(node, node) for node in nodes}
    inner = {unit: members[unit] if isinstance(unit, int) else [unit] for unit in dict.fromkeys(unit_of.values())}
    reads = {unit: {unit_of[v] for n in held for v in n.all_input_nodes} - {unit} for unit, held in inner.items()}
    return in_turn(reads, {unit: index[held[0]] for unit, held in inner.items()})


def module_of(members: Sequence[fx.Node], read: Sequence[fx.Node], left: Sequence[fx.Node]) -> fx.GraphModule:
    """Return a graph of copies of ``members``: arguments ``read``, results ``left``."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in read:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in members:
        env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[node] for node in left))
    return fx.GraphModule(nn.Module(), graph)


def regions_in(graph: fx.Graph, root: nn.Module) -> list[RegionCall]:
    """Return the captured parts of a stage, each with a graph of its own."""
    return [getattr(root, node.args[0].target) for node in graph.find_nodes(op="call_function", target=run_region)]


def comes_of_region(node: fx.Node) -> bool:
    """Return whether a node is the call of a captured part, or one of the values that it gives."""
    made = node.all_input_nodes[0] if node.target is operator.getitem else node
    return made.target is run_region
