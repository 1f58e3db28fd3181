"""The blocks that the plan recomputes: marks the begin and end of each, and adds the graph that recomputes its values.

    begin_block(c)
    n = layer_norm(x); y = linear(n, W); z = gelu(y)            rerun of c, from x and y:
    end_block(c, [n, z], [x, y])                                n = layer_norm(x); z = gelu(y)

Ops stay where they are. The rerun has the ops that the dropped values need, up to kept values, and no more.

Needs:   a finished graph, its nodes with ``meta["origin"]``, its collectives with ``meta["change"]``; regions cut.
Leaves:  one call for each piece of the stage that frees a value, and its rerun.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from passes.base import LowerContext, StageGraph, ops_of
from passes.ops import recompute as ops
from passes.ops.collectives import g
from passes.ops.dropout import counted_dropout, stream_dropout
from passes.ops.linear import gathered_linears
from passes.ops.region import run_piece
from passes.parts import comes_of_region, key_of_value, regions_in
from passes.pieces import Piece, PieceHomes
from passes.program.ops.aten import tensors_of
from passes.program.walks import walk

OF_SHAPE_ALONE = {stream_dropout, counted_dropout}  # their internal tensors do not depend on input values


def recompute(stage: StageGraph, context: LowerContext) -> None:
    """Every piece of the stage, in the graph that holds it."""
    mine = [piece for piece in context.recomputed if piece.stage == stage.index]
    if not mine:
        return
    homes = PieceHomes(stage.index, mine, context.regions)
    regions = {call.index: call for call in regions_in(stage.graph, stage.root)}
    for piece in mine:
        if piece.region is None:
            _let_go(_Part(stage.graph, stage.root, piece, homes), context)
        elif piece.region in regions:
            module = regions[piece.region].module
            _let_go(_Part(module.graph, module, piece, homes), context)
            module.recompile()


@dataclass
class _Part:
    """A graph, and the piece of it that is recomputed."""

    graph: fx.Graph
    root: nn.Module
    piece: Piece
    homes: PieceHomes

    def members(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if self._is_member(node)]

    def _is_member(self, node: fx.Node) -> bool:
        if node.op != "call_function" or "origin" not in node.meta or comes_of_region(node):
            return False
        change = node.meta.get("change")
        home = self.homes.of_call(node.meta["origin"]) if change is None else self.homes.of_change(change)
        return home is self.piece

    def has_insides(self, node: fx.Node) -> bool:
        """Return whether the rerun restores the op's own internal saved tensors. The compiler chooses those of a
        compiled piece; it reruns unchanged, with a backward, so that it saves the same."""
        if node.target is run_piece:
            return getattr(self.root, node.args[0].target).again  # pyright: ignore
        if node.target is gathered_linears and node.args[3]:  # its backward gathers its input again
            return False
        return not self.piece.insides.isdisjoint(ops_of(node)) and next(tensors_of(node), None) is not None


def _let_go(part: _Part, context: LowerContext) -> None:
    rerun = _Rerun(part)
    if not rerun.dropped and not rerun.insides:
        return
    axes = [context.tp, context.data, *context.axes.values()]
    name = f"recompute_{part.piece.index}"
    setattr(part.root, name, ops.BlockCall(name, rerun.module(), context.random, axes))
    _mark(part.graph, name, rerun)


def _mark(graph: fx.Graph, name: str, rerun: _Rerun) -> None:
    members = rerun.members
    with graph.inserting_before(next(iter(graph.nodes))):
        handle = graph.create_node("get_attr", name)
    with graph.inserting_before(members[0]):
        graph.call_function(ops.begin_block, (handle,))
    for node, number in rerun.insides.items():
        inputs: Any = list(node.all_input_nodes)
        with graph.inserting_before(node):
            graph.call_function(ops.watch_inside, (handle, number, inputs))
        with graph.inserting_after(node):
            graph.call_function(ops.unwatch_inside, (handle,))
    last: Any = members[-1].next if members[-1] in rerun.insides else members[-1]
    with graph.inserting_after(last):
        graph.call_function(ops.end_block, (handle, list(rerun.dropped), list(rerun.sources)))


class _Rerun:
    """The graph that recomputes ``dropped`` and reruns ``insides`` (with their numbers), made of copies of the
    ``members`` of a part that they need. ``sources``: its inputs, in the order of its arguments.
    """

    def __init__(self, part: _Part) -> None:
        piece, members = part.piece, part.members()
        summed = {n.all_input_nodes[0] for n in members if n.target is g and n.args[2:] == (True,)}
        tensors = [n for n in members if _is_tensor(n) and n not in summed]
        firsts = (next((n for n in tensors if key_of_value(n) in keys), None) for keys in piece.needed)
        insides = [n for n in members if part.has_insides(n)]
        self.members, self.dropped = members, sorted(n for n in firsts if n is not None)
        self.insides = {node: number for number, node in enumerate(insides)}
        # They overwrite what they read: the backward reads their values, not the earlier ones.
        overwriting = [n for n in members if not piece.overwrites.isdisjoint(ops_of(n))]
        inner = set(members) - {n for n in tensors if key_of_value(n) in piece.kept}
        # One of several results of a call outside is read itself: to hold the call's tuple would hold all of them.
        inner -= {n for n in inner if n.target is operator.getitem and n.args[0] not in inner}
        targets = [*self.dropped, *overwriting, *(n for n in insides if n.target not in OF_SHAPE_ALONE)]
        needed = set(walk(targets, lambda node: [v for v in node.all_input_nodes if v in inner]))
        self.blank = {n for n in insides if n not in needed}
        self.nodes = [n for n in members if n in needed or n in self.blank]
        read = dict.fromkeys(
            v
            for n in self.nodes
            for v in n.all_input_nodes
            if v not in needed and (n not in self.blank or not _is_tensor(v))
        )
        self.sources = list(read)

    def module(self) -> fx.GraphModule:
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        rerun = graph.placeholder("rerun")
        for node in self.sources:
            env[node] = graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
        for node in self.nodes:
            if node not in self.insides:
                env[node] = graph.node_copy(node, lambda n: env[n])
                continue
            copy = self._inside(graph, rerun, node, env)
            if node not in self.blank:
                env[node] = copy
        graph.output(tuple(env[node] for node in self.dropped))
        return fx.GraphModule(nn.Module(), graph)

    def _inside(self, graph: fx.Graph, rerun: fx.Node, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        """Return the op between two calls that watch it, with the first one's results as inputs."""
        number, inputs = self.insides[node], list(node.all_input_nodes)
        if node in self.blank:
            given = [None if _is_tensor(v) else env[v] for v in inputs]
            leaves = graph.call_function(ops.blank_inputs, (rerun, number, given))
        else:
            leaves = graph.call_function(ops.enter_inside, (rerun, number, [env[v] for v in inputs]))
        read = {v: graph.call_function(operator.getitem, (leaves, i)) for i, v in enumerate(inputs)}
        copy = graph.node_copy(node, lambda n: read[n])
        result = graph.call_function(ops.leave_inside, (rerun, copy))
        result.meta = dict(node.meta)
        return result


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)
