"""Each piece that the plan lists becomes one call of a graph of its own, for which the runtime compiles a function.

    y = add(x, h); n = layer_norm(y, w, b)   →   (y, n) = run_piece(piece_3, [x, h, w, b])

Parameters are arguments, so that all copies of a block share one function.

Needs:   a finished graph, its nodes with ``meta["origin"]``, its collectives with ``meta["change"]``; regions cut.
Leaves:  one call for each piece of the stage, in its own graph or in a region's; everything else in its old order.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx, nn

from passes.base import LowerContext, StageGraph, text_of
from passes.moe.domain import counts_rows
from passes.ops.compiled import CompiledCall, run_piece
from passes.pieces import CompiledPiece
from passes.program.source_lines import where_of
from passes.units import comes_of_region, in_order, module_of, regions_in


def compile_pieces(stage: StageGraph, context: LowerContext) -> None:
    """One call a piece, as early as its inputs allow, in the graph that holds it: the stage's, or a region's."""
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
    """The pieces of a stage, also of those in captured regions."""
    graphs = [(graph, root), *((region.module.graph, region.module) for region in regions_in(graph, root))]
    marks = ((graph.find_nodes(op="call_function", target=run_piece), root) for graph, root in graphs)
    return [getattr(root, node.args[0].target) for nodes, root in marks for node in nodes]


def _rewritten(graph: fx.Graph, root: nn.Module, pieces: dict[int, CompiledPiece]) -> dict[fx.Node, fx.Node]:
    """Of each node that is left, the node of the new graph."""
    owner = {name: piece.index for piece in pieces.values() for name in piece.nodes}
    members: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if _is_plain(node) and node.meta.get("origin") in owner:
            members.setdefault(owner[node.meta["origin"]], []).append(node)
    place = {node: index for index, nodes in members.items() for node in nodes}
    new, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for unit in in_order(graph, place, members):
        if isinstance(unit, fx.Node):
            env[unit] = new.node_copy(unit, lambda n: env[n])
        else:
            _call(root, new, pieces[unit], members[unit], env)
    return env


def _is_plain(node: fx.Node) -> bool:
    """Whether a node is an op as captured: no collective, no call of ours, no value that a region gives."""
    is_op = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
    return node.op == "call_function" and is_op and "change" not in node.meta and not comes_of_region(node)


def _call(
    root: nn.Module, graph: fx.Graph, piece: CompiledPiece, members: Sequence[fx.Node], env: dict[fx.Node, fx.Node]
) -> None:
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
