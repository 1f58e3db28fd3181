"""The sequence dims of values that are made of batch inputs alone: ids on their way to an embedding.

    ids [b, t] → 1      pad, shifted, masked ids → 1      ids.view(b·t) → 0      x [b, t, f] of floats → 1

Weights may enter before float work over tokens begins: frozen embeddings of ids, with trained positions added, are a
sequence still. A value that a rule cannot follow (a shift along the sequence) keeps its sequence dims if it has as many
dims: shifted ids are a sequence still. Positions, which no input enters, have none: they follow their readers.
"""

from __future__ import annotations

from torch import fx

from passes.partition.options.base import Site
from passes.partition.sequence.rules import options_over_cp
from passes.program.ops.aten import is_pointwise, is_random, shape_of, tensors_of
from passes.program.ops.groups import MOVES
from passes.program.ops.products import PRODUCTS
from passes.program.program import Program
from passes.program.weights import is_weight
from passes.types.types import Placement, V


def sequence_flow(program: Program) -> dict[fx.Node, set[Placement]]:
    """Node → cuts of its sequence; for values before float work begins."""
    flow: dict[fx.Node, set[Placement]] = {}
    for node in program.graph.graph.nodes:
        if node.name in program.inputs:
            flow[node] = of_input(node)
        elif node.op == "call_function" and not (node.meta.get("grad") and begins(node)) and not is_random(node):
            given = {n: flow[n] for n in node.all_input_nodes if flow.get(n)}
            if given:
                flow[node] = carried(node, given)
    return flow


def begins(node: fx.Node) -> bool:
    """Whether float work over tokens may begin at an op: one with a gradient that computes more than element by
    element, or a product with a frozen weight. Frozen embeddings may still be joined to trained ones: virtual tokens.
    """
    if node.meta.get("grad"):
        return not is_pointwise(node.target) and node.target not in MOVES
    return node.target in PRODUCTS and any(map(is_weight, node.all_input_nodes))


def of_input(node: fx.Node) -> set[Placement]:
    """The dim behind the batch: of ids [b, t], and of floats [b, t, features]."""
    shape, dtype = shape_of(node), node.meta["val"].dtype
    dims = 3 if dtype.is_floating_point or dtype.is_complex else 2
    return {V(1, shape[1])} if len(shape) == dims and shape[1] > 1 else set()


def carried(node: fx.Node, given: dict[fx.Node, set[Placement]]) -> set[Placement]:
    """Cuts of the result that follow from cuts of its operands: by a rule, or at the same dim."""
    if next(tensors_of(node), None) is None:
        return set()
    site = Site(node, 1, {n.name: cuts for n, cuts in given.items()})
    found: set[Placement] = set()
    for option in options_over_cp(site):
        pairs = zip(site.inputs, option.args, strict=True)
        if option.out.is_sharded and any(t.is_sharded and t in given.get(n, ()) for n, t in pairs):
            found.add(option.out)
    shape = shape_of(node)
    return found or {
        V(c.dim, shape[c.dim])
        for n, cuts in given.items()
        for c in cuts
        if len(shape_of(n)) == len(shape) and shape[c.dim] > 1
    }
