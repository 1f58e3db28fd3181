"""find_experts(program): every layer of experts, found by its structure, and each candidate that is not understood.

A router chooses k of E by scores, or each of E takes tokens by them. E is also a dim of the weights of products that
keep the experts apart (stacks), or the number of equal branches, each weighted by its choices (loops). All
else is no layer of experts.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from torch import fx

from passes.moe.branches import branches_of
from passes.moe.equal_calls import merge_equal_calls
from passes.moe.layers import Dispatch, Doubt, ExpertLayer, Experts, ExpertWeight
from passes.moe.own_slices import read_with_stacks
from passes.moe.paths import (
    between,
    carrying,
    choices_of,
    combined_of,
    dispatch_of,
    is_taken,
    probs_of,
    tokens_of,
)
from passes.moe.products import Product, ends, products_of, stacks_in, weights_of
from passes.moe.space import Space, spaces, takings
from passes.program.ops.aten import shape_of
from passes.program.ops.groups import SORTS
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.weights import is_parameter


def find_experts(program: Program) -> Experts:
    """In the graph's order. If a part is not understood, equal calls of one weight become one, and all is looked at
    again: experts that share their first layers read the same values then."""
    found = _found(program)
    return _found(program) if found.doubts and merge_equal_calls(program) else found


def _found(program: Program) -> Experts:
    layers: list[ExpertLayer] = []
    doubts: list[Doubt] = []
    known = set[str]()
    for space in sorted(spaces(program.graph.graph), key=lambda s: s.root, reverse=True):
        found = _layer(space, known)
        if isinstance(found, ExpertLayer):
            layers.append(found)
            known |= set(found.products)
        elif found:
            doubts.append(Doubt(found, where_of(space.choices[0])))
    for space in reversed(takings(program.graph.graph)):
        found = _of_takers(space, known)
        if found is not None:
            layers.append(found)
            known |= set(found.products)
    return Experts(tuple(sorted(layers, key=lambda layer: program.node(layer.products[0]))), tuple(reversed(doubts)))


def _layer(space: Space, later: Set[str]) -> ExpertLayer | str:
    """The layer, or the reason why a candidate is none; "" without a candidate. ``later``: products of layers after it,
    which may be the same one applied again."""
    products = _products(space, later)
    if products:
        return _of_stacks(space, products)
    return _of_branches(space)


def _of_stacks(space: Space, products: list[Product], takes: bool = False) -> ExpertLayer | str:
    """``takes``: experts take tokens."""
    first, last = ends(products, space.above)
    tokens = tokens_of(space, [p.x for p in first])
    if len(tokens) != 1:
        return f"its {space.size} experts read {len(tokens)} values, not only the tokens"
    nodes = [p.node for p in products]
    combined = combined_of(space, [p.node for p in last], tokens[0])
    if combined is None:
        return f"the results of its {space.size} experts are not summed to one value per token"
    dispatch, capacity = dispatch_of(space, first, tokens[0])
    if takes and dispatch is Dispatch.CAPACITY:
        dispatch = Dispatch.TAKEN
    weights = weights_of(space, products, first, last)
    found = _made(space, nodes, tokens[0], combined, dispatch, capacity, weights)
    if isinstance(found, str):
        return found
    return replace(found, beside=tuple(read_with_stacks(space, stacks_in(space))))


def _products(space: Space, later: Set[str]) -> list[Product]:
    return [p for p in products_of(space) if p.node not in space.above and p.node.name not in later]


def _of_takers(space: Space, later: Set[str]) -> ExpertLayer | None:
    """Experts that take the tokens which they like best: the same ones for each choice of an expert, of all tokens."""
    products = _products(space, later)
    if not products or not all(is_taken(p.x, space) for p in ends(products, space.above)[0]):
        return None
    found = _of_stacks(space, products, takes=True)
    return found if isinstance(found, ExpertLayer) and found.dispatch is Dispatch.TAKEN else None


def _of_branches(space: Space) -> ExpertLayer | str:
    found = branches_of(space)
    if found is None or isinstance(found, str):
        return found or ""
    tokens = tokens_of(space, found.first)
    if len(tokens) != 1:
        return f"its {space.size} branches read {len(tokens)} values, not only the tokens"
    combined = combined_of(space, found.last, tokens[0], joins=True)
    if combined is None:
        return f"the results of its {space.size} branches are not summed to one value per token"
    dispatch = Dispatch.CAPACITY if found.capacity else Dispatch.EVERY_TOKEN
    weights, tips = found.weights, found.last
    return _made(space, found.products, tokens[0], combined, dispatch, found.capacity, weights, tips)


def _made(
    space: Space,
    products: list[fx.Node],
    tokens: fx.Node,
    combined: fx.Node,
    dispatch: Dispatch,
    capacity: int,
    weights: list[ExpertWeight],
    tips: Sequence[fx.Node] = (),
) -> ExpertLayer | str:
    takes = dispatch is Dispatch.TAKEN
    chosen, top_k = (space.chosen, 0) if takes else choices_of(space, combined)
    if not takes and not 0 < top_k <= space.size:
        return f"the number of its {space.size} experts per token is unknown"
    way, carried = between(products, combined)
    before = carrying(space, tokens, products)
    probs = probs_of(space, way, carried) or probs_of(space, before, before | {tokens})
    orders = [n for n in sorted(space.below) if n.target in SORTS and n.args[0] in space.ids]
    stacks = stacks_in(space)
    scoring = [n for n in space.places if is_parameter(n) and n in space.scored and n not in stacks]
    router = [n for n in scoring if sum(d > 1 for d in shape_of(n)) > 1]
    return ExpertLayer(
        space.size,
        top_k,
        dispatch,
        capacity,
        space.root.name,
        _names(router),
        _names(chosen),
        _names(probs),
        _names(sorted(orders)),
        tuple(weights),
        _names(products),
        tokens.name,
        combined.name,
        _names(tips),
    )


def _names(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    return tuple(n.name for n in nodes)
