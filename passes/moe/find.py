"""find_experts(program): every layer of experts, found by its structure, and each candidate that is not understood.

A router chooses k of E by scores, or each of E takes tokens by them. E is also a dim of the weights of products that
keep the experts apart (stacks), or the number of equal branches, each weighted by its choices (loops). All
else is no layer of experts.

Experts that share their first layers compute them once, for all: norm(x), norm(x) … of each → one norm(x), which all
read. Values stay the same to the bit; gradients are added up before the call's backward instead of behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace

from torch import fx
from torch._ops import OpOverload

from passes.moe.branches import Branches, branches_of, names_of
from passes.moe.layers import Dispatch, Doubt, ExpertLayer, Experts
from passes.moe.paths import (
    Product,
    between,
    carrying,
    choices_of,
    combined_of,
    dispatch_of,
    ends,
    is_taken,
    probs_of,
    products_of,
    read_with_stacks,
    stacks_in,
    tokens_of,
    weights_of,
)
from passes.moe.space import Space, spaces, takings
from passes.program.ops.aten import draws, shape_of
from passes.program.ops.groups import SORTS
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.weights import is_parameter


def find_experts(program: Program) -> Experts:
    """In the graph's order. If a part is not understood, equal calls of one weight become one, and all is looked at
    again: experts that share their first layers read the same values then."""
    found = _found(program)
    return _found(program) if found.doubts and _merge_equal_calls(program) else found


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


def _products(space: Space, later: Set[str]) -> list[Product]:
    return [p for p in products_of(space) if p.node not in space.above and p.node.name not in later]


def _of_stacks(space: Space, products: list[Product], takes: bool = False) -> ExpertLayer | str:
    """``takes``: experts take tokens."""
    first, last = ends(products, space.above)
    whole, weights = [p.node for p in products], weights_of(space, products, first, last)
    parts = Branches([p.x for p in first], [p.node for p in last], whole, weights)
    found = _made(space, parts, lambda tokens: dispatch_of(space, first, tokens, takes))
    return found if isinstance(found, str) else replace(found, beside=tuple(read_with_stacks(space)))


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
    dispatch = (Dispatch.CAPACITY if found.capacity else Dispatch.EVERY_TOKEN, found.capacity)
    made = _made(space, found, lambda _: dispatch, "branches")
    return made if isinstance(made, str) else replace(made, tips=names_of(found.last))


def _made(
    space: Space, parts: Branches, dispatch_by: Callable[[fx.Node], tuple[Dispatch, int]], kind: str = "experts"
) -> ExpertLayer | str:
    tokens = tokens_of(space, parts.first)
    if len(tokens) != 1:
        return f"its {space.size} {kind} read {len(tokens)} values, not only the tokens"
    combined = combined_of(space, parts.last, tokens[0], joins=kind == "branches")
    if combined is None:
        return f"the results of its {space.size} {kind} are not summed to one value per token"
    dispatch, capacity = dispatch_by(tokens[0])
    takes = dispatch is Dispatch.TAKEN
    chosen, top_k = (space.chosen, 0) if takes else choices_of(space, combined)
    if not takes and not 0 < top_k <= space.size:
        return f"the number of its {space.size} experts per token is unknown"
    way, carried = between(parts.products, combined)
    before = carrying(space, tokens[0], parts.products)
    stacks = stacks_in(space)
    scoring = [n for n in space.places if is_parameter(n) and n in space.scored and n not in stacks]
    return ExpertLayer(
        space.size,
        top_k,
        dispatch,
        capacity,
        logits=space.root.name,
        router=names_of(n for n in scoring if sum(d > 1 for d in shape_of(n)) > 1),
        chosen=names_of(chosen),
        probs=names_of(probs_of(space, way, carried) or probs_of(space, before, before | {tokens[0]})),
        orders=names_of(n for n in sorted(space.below) if n.target in SORTS and n.args[0] in space.ids),
        weights=tuple(parts.weights),
        products=names_of(parts.products),
        tokens=tokens[0].name,
        combined=combined.name,
    )


# ---- calls that experts share


def _merge_equal_calls(program: Program) -> bool:
    """Equal calls that read one weight become one, in place; returns whether there were any. Not merged: draws, and
    functions that are no op of PyTorch."""
    graph = program.graph.graph
    work = [n for n in graph.nodes if is_parameter(n) and len(n.users) > 1]
    changed = False
    while work:
        alike: dict[object, list[fx.Node]] = {}
        for user in sorted(work.pop().users):
            if isinstance(user.target, OpOverload) and user.target.namespace == "aten" and not draws(user.target):
                alike.setdefault(_call(user), []).append(user)
        for first, *others in alike.values():
            for other in others:
                first.meta["grad"] = first.meta["grad"] or other.meta["grad"]  # one of them may lead to choices alone
                other.replace_all_uses_with(first)
                graph.erase_node(other)
            if others:
                work.append(first)
                changed = True
    if changed:
        program.graph_changed()
    return changed


def _call(node: fx.Node) -> object:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.name)
    return node.target, repr(args), repr(kwargs)
