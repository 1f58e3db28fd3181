"""Values of all experts that are no stack of the layer, but are read with one: the factors of an adapter.

    W' = baddbmm(W[E, i, o], a[E, i, r], b[E, r, o])

The stack is sharded over ep. The factors are views of weights that every rank has: each rank reads its own experts'
slices of them, and its gradient of such a weight is that of these slices.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from passes.moe import exchange
from passes.moe.building import Builder
from passes.moe.domain import Domain
from passes.moe.inside import made_of
from passes.moe.layers import ExpertLayer
from passes.moe.space import Space
from passes.program.program import Program
from passes.program.walks import operands, readers, walk
from passes.program.weights import is_computed_weight


def read_with_stacks(space: Space, stacks: list[fx.Node]) -> list[tuple[str, int]]:
    """Values of all experts, made of other weights, of which what calls read beside a stack is made; with their dim of
    experts, in the graph's order."""
    made = set(walk(stacks, readers, into=lambda n: n in stacks or is_computed_weight(n)))
    beside = [n for call in made - set(stacks) for n in call.all_input_nodes if n not in made]
    first = walk(
        [n for n in beside if space.dim(n) >= 0], lambda n: n.all_input_nodes if _is_by_expert(space, n) else ()
    )
    return [(node.name, space.dim(node)) for node in sorted(set(first)) if not _is_by_expert(space, node)]


def _is_by_expert(space: Space, node: fx.Node) -> bool:
    """Whether a call computes each expert's slice of its own slices alone: all that it reads has a dim of experts."""
    read = node.all_input_nodes if node.op == "call_function" else []
    return bool(read) and all(space.dim(n) >= 0 for n in read)


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
