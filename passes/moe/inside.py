"""The weights of a layer of experts, values made of them alone, and the calls from the first to the last of them.

Stacks stay whole, of each expert of a loop its parameters and its parts of stacks are known:

    self.up[e].weight      a parameter            w1[e], w1.unbind(0)[e]      a slice w1[e:e + 1]

Values of all experts that are no stack of the layer, but are read with one, are the factors of an adapter:

    W' = baddbmm(W[E, i, o], a[E, i, r], b[E, r, o])

The stack is sharded over ep. The factors are views of weights that every rank has: each rank reads its own experts'
slices of them, and its gradient of such a weight is that of these slices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import replace

from torch import Tensor, fx

from passes.moe import exchange
from passes.moe.domain import Builder, Domain, erase_unread
from passes.moe.layers import ExpertLayer, ExpertWeight, Refusal
from passes.moe.ties import Pick, picks
from passes.program.ops.aten import aten, shape_of
from passes.program.program import Program
from passes.program.walks import operands, readers, walk


def apart_from(program: Program, layer: ExpertLayer, layers: Iterable[ExpertLayer]) -> frozenset[fx.Node]:
    """The calls of other layers with weights of ``layer``: of a layer that a model applies several times."""
    held = {name for weight in layer.weights for name in weight.nodes}
    others = [o for o in layers if o.tokens != layer.tokens and held & {n for w in o.weights for n in w.nodes}]
    return frozenset(node for other in others for node in _calls_of(program, other))


def _calls_of(program: Program, layer: ExpertLayer) -> set[fx.Node]:
    """All calls from the tokens of a layer, and from its router, to its combined value."""
    first, last = [program.node(layer.tokens), program.node(layer.logits)], program.node(layer.combined)
    below = set(walk(first, readers, into=lambda n: n <= last))
    return below & set(walk([last], operands, into=lambda n: n > min(first))) - {first[0]}


def made_of(stacks: Iterable[fx.Node]) -> set[fx.Node]:
    """Stacks, and calls that read nothing else."""
    known = set(stacks)
    work = [u for n in sorted(known) for u in n.users]
    while work:
        node = work.pop()
        if node not in known and node.op == "call_function" and all(n in known for n in node.all_input_nodes):
            known.add(node)
            work += node.users
    return known


def inside_of(of_stacks: set[fx.Node], apart: Set[fx.Node]) -> set[fx.Node]:
    """Calls that read stacks, and calls between them; then calls that read only such values. Without those of other
    layers (``apart``)."""
    seeds = {u for n in of_stacks for u in n.users if u not in of_stacks and u not in apart}
    first, last = min(seeds), max(seeds)  # nodes of one graph are in its order: no walk beyond
    between = set(walk(seeds, readers, into=lambda n: n <= last))
    between &= set(walk(seeds, operands, into=lambda n: n >= first))
    inside = seeds | between
    while len(border_of(inside)) > 1:
        joined = {u for n in border_of(inside) for u in n.users if u not in inside and _joins(u, inside)}
        if not joined:
            break
        inside |= joined
    return inside


def outer_of(node: fx.Node, inside: Collection[fx.Node]) -> list[fx.Node]:
    """The values that a call reads from outside, except numbers that are the same for all."""
    return [n for n in node.all_input_nodes if n not in inside and not is_number(n)]


def is_number(node: fx.Node) -> bool:
    """Whether a value is one number, the same for all."""
    val = node.meta["val"]
    return isinstance(val, Tensor) and val.numel() == 1 and not node.meta["grad"]


def check_read(stacks: Iterable[fx.Node], inside: Collection[fx.Node], refusal: Refusal) -> None:
    for stack in stacks:
        if any(u not in inside for u in stack.users):
            raise refusal(stack, "a stack of experts is read outside the expert layer")


def border_of(inside: set[fx.Node]) -> list[fx.Node]:
    """Calls inside that others read, in the graph's order."""
    return [n for n in sorted(inside) if any(u not in inside for u in n.users)]


def _joins(user: fx.Node, inside: set[fx.Node]) -> bool:
    return user.op == "call_function" and all(n in inside for n in operands(user))


# ---- stacks, and values that are read with them


def take_own_slices(program: Program, layer: ExpertLayer) -> ExpertLayer:
    """Rewrite ``program`` so that stacks are read with a rank's own slices; returns the layer with these."""
    way, own = _way(program, layer), list[tuple[str, int]]()
    for name, dim in layer.beside:
        value = program.node(name)
        at = sorted(way & set(value.users))
        build = Builder(program.graph.graph, at[0], value)
        taken = build.call(exchange.own_slices, value, dim, val=value.meta["val"], domain=Domain(experts=dim))
        for reader in at:
            reader.replace_input_with(value, taken)
        own.append((taken.name, dim))
    return replace(layer, beside=tuple(own))


def _way(program: Program, layer: ExpertLayer) -> set[fx.Node]:
    """The calls from the values beside the stacks to those that read them with a stack."""
    stacks = {program.node(weight.nodes[0]) for weight in layer.weights}
    made = made_of(stacks_of(program, layer))
    changed = made & set(walk(stacks, readers, into=made.__contains__))
    return set(walk(changed, operands, into=made.__contains__))


def stacks_of(program: Program, layer: ExpertLayer) -> dict[fx.Node, int]:
    """The dim of experts of each stack of ``layer``, and of a rank's own slices of other weights."""
    of_weights = [(weight.nodes[0], weight.dim) for weight in layer.weights]
    return {program.node(name): dim for name, dim in (*of_weights, *layer.beside)}


# ---- the weights of each expert


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
