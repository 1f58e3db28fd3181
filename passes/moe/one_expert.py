"""The weights of one expert of a loop: parameters of its own, and its parts of stacks.

self.up[e].weight      a parameter            w1[e], w1.unbind(0)[e]      a slice w1[e:e + 1]
"""

from __future__ import annotations

from torch import fx

from passes.moe.building import Builder, erase_unread
from passes.moe.domain import Domain
from passes.moe.inside import check_read, made_of
from passes.moe.layers import ExpertLayer, ExpertWeight
from passes.moe.picks import Pick, picks
from passes.moe.refusals import Refusal
from passes.program.ops.aten import aten, shape_of
from passes.program.program import Program


def weights_of_each(program: Program, layer: ExpertLayer, refusal: Refusal, *, alone: bool) -> list[set[fx.Node]]:
    """For each expert its weights, with values made of them alone; its parts of stacks become slices. ``alone``: every
    rank has all experts. Raises the error of ``refusal`` for a stack with another reader."""
    held: list[list[fx.Node]] = [[] for _ in range(layer.num_experts)]
    for weight in layer.weights:
        for number, nodes in enumerate(_parts_of(program, weight, refusal, alone)):
            held[number] += nodes
    return [made_of(nodes) for nodes in held]


def _parts_of(program: Program, weight: ExpertWeight, refusal: Refusal, alone: bool) -> list[list[fx.Node]]:
    """For each expert the nodes that have its part."""
    if weight.dim < 0:
        return [[program.node(name)] for name in weight.nodes]
    stack = program.node(weight.nodes[0])
    parts: list[list[fx.Node]] = [[] for _ in range(weight.shape[weight.dim])]
    for pick in sorted(picks(stack, weight.dim), key=lambda pick: pick.node):
        parts[pick.number].append(_as_slice(program.graph.graph, pick))
    if not alone:
        check_read([stack], [node for nodes in parts for node in nodes], refusal)
        stack.meta["domain"] = Domain(experts=weight.dim)
    return parts


def _as_slice(graph: fx.Graph, pick: Pick) -> fx.Node:
    """The call that takes the part, with a dim of size 1; its readers get the same value."""
    if pick.node.target is aten.slice.Tensor:
        return pick.node
    build = Builder(graph, pick.node, pick.node)
    part = build.call(aten.slice.Tensor, pick.whole, pick.dim, pick.number, pick.number + 1)
    seen = part if pick.keeps else build.call(aten.reshape.default, part, list(shape_of(pick.node)))
    pick.node.replace_all_uses_with(seen)
    erase_unread(graph, [pick.node])
    return part
