"""find_experts(program): every layer of experts, found by its structure, and each candidate that is not understood.

A router chooses k of E by scores, or each of E takes tokens by them. E is also a dim of the weights of products that
keep the experts apart (stacks), or the number of equal branches, each weighted by its choices (loops). All
else is no layer of experts.

    combined[t] = Σ_e  g_e[t] · branch_e(tokens)[t]        g_e: the router's weight of expert e alone

Branches, which a loop over modules leaves side by side, are those of one layer if they are equal except for their own
weights, and each number has one.

Experts that share their first layers compute them once, for all: norm(x), norm(x) … of each → one norm(x), which all
read. Values stay the same to the bit; gradients are added up before the call's backward instead of behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._ops import OpOverload

from passes.moe import paths
from passes.moe.expert_dims import Space, spaces
from passes.moe.layers import Dispatch, Doubt, ExpertLayer, Experts, ExpertWeight
from passes.moe.ties import base, pick_of, pick_of_weight, picks
from passes.program.ops.aten import aten, draws, shape_of
from passes.program.ops.groups import JOINS
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.walks import between, in_order, leads_out, operands, readers, walk
from passes.program.weights import is_parameter, is_weight
from passes.rules.follow import stays_zero
from passes.rules.table import rule_of


def find_experts(program: Program) -> Experts:
    """Return the layers in the graph's order. If a part is not understood, equal calls of one weight become one and the
    search is repeated: experts that share their first layers read the same values then."""
    found = _found(program)
    return _found(program) if found.doubts and _merge_equal_calls(program) else found


def _found(program: Program) -> Experts:
    layers: list[ExpertLayer] = []
    doubts: list[Doubt] = []
    graph, known = program.graph.graph, set[str]()
    for space in spaces(graph):
        products = [p for p in paths.products_of(space) if p.node not in space.above and p.node.name not in known]
        try:
            found = _layer(space, products)
        except _Unclear as error:
            doubts += [] if space.takes else [Doubt(str(error), where_of(space.choices[0]))]
            continue
        if found is not None:
            layers.append(found)
            known |= set(found.products)  # which may be a layer before, applied again
    return Experts(tuple(sorted(layers, key=lambda layer: program.node(layer.products[0]))), tuple(reversed(doubts)))


class _Unclear(Exception):
    """The reason why a candidate is not understood as a layer."""


def _layer(space: Space, products: list[paths.Product]) -> ExpertLayer | None:
    """Return the layer; None without a candidate. Raises _Unclear.

    Experts that take the tokens which they like best take the same ones for each choice of an expert, of all tokens.
    """
    parts = _stacks(space, products) if products else None if space.takes else branches_of(space)
    if parts is None or (space.takes and not all(paths.is_taken(x, space) for x in parts.first)):
        return None
    return _made(space, parts)


def _stacks(space: Space, products: list[paths.Product]) -> Parts:
    first, last = paths.ends(products, space.above)
    held = [((w,), space.dim(w)) for w in sorted({*paths.stacks_in(space), *(p.weight for p in products)})]
    weights = paths.weights_of(held, products, first, last)
    return Parts([p.x for p in first], [p.node for p in last], [p.node for p in products], weights, first)


def _made(space: Space, parts: Parts) -> ExpertLayer:
    kind, tokens = "experts" if parts.of_stacks else "branches", paths.tokens_of(space, parts.first)
    if len(tokens) != 1:
        raise _Unclear(f"its {space.size} {kind} read {len(tokens)} values, not only the tokens")
    combined = paths.combined_of(space, parts.last, tokens[0], joins=not parts.of_stacks)
    if combined is None:
        raise _Unclear(f"the results of its {space.size} {kind} are not summed to one value per token")
    dispatch, capacity = Dispatch.CAPACITY if parts.capacity else Dispatch.EVERY_TOKEN, parts.capacity
    if parts.of_stacks:
        dispatch, capacity = paths.dispatch_of(space, parts.of_stacks, tokens[0])
    if space.takes and dispatch is not Dispatch.TAKEN:
        raise _Unclear
    chosen, top_k = (space.chosen, 0) if space.takes else paths.choices_of(space, combined)
    if not space.takes and not 0 < top_k <= space.size:
        raise _Unclear(f"the number of its {space.size} experts per token is unknown")
    carried, before = between(parts.products, [combined]), paths.carrying(space, tokens[0], parts.products)
    probs = paths.probs_of(space, carried.difference(parts.products), carried)
    stacks = paths.stacks_in(space)
    scoring = [n for n in space.places if is_parameter(n) and n in space.scored and n not in stacks]
    return ExpertLayer(
        space.size,
        top_k,
        dispatch,
        capacity,
        logits=space.root.name,
        router=paths.names_of(n for n in scoring if sum(d > 1 for d in shape_of(n)) > 1),
        chosen=paths.names_of(chosen),
        probs=paths.names_of(probs or paths.probs_of(space, before, before | {tokens[0]})),
        weights=tuple(parts.weights),
        products=paths.names_of(parts.products),
        tokens=tokens[0].name,
        combined=combined.name,
        tips=() if parts.of_stacks else paths.names_of(parts.last),
        beside=tuple(paths.read_with_stacks(space)) if parts.of_stacks else (),
    )


# ---- calls that experts share


def _merge_equal_calls(program: Program) -> bool:
    """Merge equal calls that read one weight, or one value of such calls, in place; return whether there were any.
    Draws, and functions that are no op of PyTorch, stay."""
    graph, firsts, merged = program.graph.graph, dict[object, fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload) or node.target.namespace != "aten" or draws(node.target):
            continue
        first = firsts.setdefault((node.target, repr(node.args), repr(dict(node.kwargs))), node)
        if first is not node and any(is_parameter(n) or n in merged for n in node.all_input_nodes):
            first.meta["grad"] = first.meta["grad"] or node.meta["grad"]  # one of them may lead to choices alone
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            merged.add(first)
    return bool(merged)


# ---- experts that stand side by side


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a candidate. ``first``: what the inputs of the first products are made of; ``last``: the last
    products with stacks, or the summands of branches, in the experts' order. ``of_stacks``: the first products with
    stacks; none of branches. ``capacity``: the number of rows that each branch reads of its own part of a value with a
    dim of experts; 0 if all read the same rows."""

    first: list[fx.Node]
    last: list[fx.Node]
    products: list[fx.Node]
    weights: list[ExpertWeight]
    of_stacks: Sequence[paths.Product] = ()
    capacity: int = 0


def branches_of(space: Space) -> Parts | None:
    """Return the experts' branches; None if weights do not belong to numbers. Raises _Unclear."""
    values = _values_of_one(space)
    tips = {n: e for n, e in values.items() if leads_out(n, values)}
    own = _own(space, tips)
    tips = {n: e for n, e in tips.items() if any(_is_own_weight(w, own[n]) and len(shape_of(w)) > 1 for w in own[n])}
    if (held := len({*tips.values()})) < 2:
        return None
    each = len(tips) // space.size  # one, or one for each choice of a token
    if sorted(tips.values()) != sorted([*range(space.size)] * each):
        raise _Unclear(f"they have weights for {held} of its {space.size} numbers, in {len(tips)} branches")
    last = sorted(tips, key=lambda n: (tips[n], n))
    orders = [in_order([n], step=lambda x, own=own[n]: [y for y in operands(x) if y in own]) for n in last]
    for first in range(each):
        numbers = [tips[tip] for tip in last[first::each]]
        if not _are_alike(numbers, orders[first::each], values):
            raise _Unclear(f"the branches of its {space.size} numbers differ from each other")
    weights = [{*map(_weight_of, order)} for order in (orders if each > 1 else ())]
    if any(weights[i] != weights[i // each * each] for i in range(len(weights))):
        raise _Unclear(f"the branches of one of its {space.size} numbers have different weights")
    columns = [column for column in zip(*orders[::each], strict=True) if _is_own_weight(column[0], orders[0])]
    return _branches(space, last, orders, dict.fromkeys(_held(column, space.size) for column in columns))


def _weight_of(node: fx.Node) -> tuple[fx.Node | None, int, int]:
    """Return (parameter, dim, number) of a part of a stack; (parameter, -1, -1) of itself; (None, -1, -1) of others."""
    pick = pick_of_weight(node)
    return (node if is_parameter(node) else None, -1, -1) if pick is None else (pick.whole, pick.dim, pick.number)


def _is_own_weight(node: fx.Node, own: Collection[fx.Node]) -> bool:
    """Return whether a value is a weight of one branch alone, or that branch's part of a stack."""
    weight, dim, _ = _weight_of(node)
    return weight is not None and (dim < 0 or weight not in own)


def _values_of_one(space: Space) -> dict[fx.Node, int]:
    """Return value → its expert's number: of values that test for one number, and those made of them before any sum."""
    known: dict[fx.Node, int] = {}
    for node, number in walk(_asked(space), lambda at: [(u, at[1]) for u in at[0].users if _passes(u, known, at[1])]):
        known.setdefault(node, number)
    return known


def _asked(space: Space) -> Iterator[tuple[fx.Node, int]]:
    for node in sorted(space.ids):
        yield from ((u, u.args[1]) for u in node.users if u.target is aten.eq.Scalar)  # pyright: ignore[reportReturnType]
    for node in space.places:
        dim = space.dim(node)
        if dim < 0 or node in space.scored:
            continue
        if node.target in JOINS and len(node.args[0]) == space.size:  # pyright: ignore[reportArgumentType]
            yield from ((part, e) for e, part in enumerate(node.all_input_nodes))
        yield from ((pick.node, pick.number) for pick in picks(node, dim))


def _passes(user: fx.Node, known: Mapping[fx.Node, int], number: int) -> bool:
    """Return whether a result is of that number alone: made of its values and weights, or zero where these are."""
    if user.op != "call_function" or any(known.get(n, number) != number for n in user.all_input_nodes):
        return False
    if user.target is aten.add.Tensor and user.args[1] == 0:
        return False  # sum() begins with 0
    if user.target in JOINS and is_weight(user) and not all(n in known for n in user.all_input_nodes):
        return False  # the weights of all numbers in one
    is_own = all(n in known or is_weight(n) for n in user.all_input_nodes)
    return (is_own and rule_of(user) is not None) or stays_zero(user, known)


def _own(space: Space, tips: Mapping[fx.Node, int]) -> dict[fx.Node, set[fx.Node]]:
    """Return for each value its ancestors that no value of another number has."""
    above = {n: set(walk([n], operands, into=lambda n: is_weight(n) or n not in space.above)) for n in tips}
    holders: dict[fx.Node, set[int]] = {}
    for tip, nodes in above.items():
        for node in nodes:
            holders.setdefault(node, set()).add(tips[tip])
    return {tip: {n for n in nodes if len(holders[n]) == 1} for tip, nodes in above.items()}


def _are_alike(numbers: list[int], orders: list[list[fx.Node]], values: Mapping[fx.Node, int]) -> bool:
    """Return whether the branches of all numbers compute the same; each may take its number's part of another value."""
    plain = {_form(order, None, values) for order in orders}
    return len(plain) == 1 or len({_form(*given, values) for given in zip(orders, numbers, strict=True)}) == 1


def _form(order: list[fx.Node], number: int | None, values: Mapping[fx.Node, int]) -> tuple[Any, ...]:
    """Return the computation of a branch, without the names of its own values and its number. ``number``: if it takes
    that part of other values."""
    position = {node: i for i, node in enumerate(order)}

    def line(node: fx.Node) -> tuple[Any, ...]:
        if node.op == "placeholder" or _is_own_weight(node, position):
            return ("weight", shape_of(node), str(node.meta["val"].dtype))
        pick = None if number is None else pick_of(node)
        if pick is not None and pick.number == number and pick.whole not in position:
            return ("part", pick.whole.name, pick.dim)
        asks = node in values and not any(n in values for n in node.all_input_nodes)
        given = (node.args[:1] if asks else node.args, dict(node.kwargs))
        return (str(node.target), shape_of(node), repr(fx.map_arg(given, lambda n: f"<{position.get(n, n.name)}>")))

    return tuple(line(node) for node in order)


def _branches(
    space: Space, last: list[fx.Node], orders: list[list[fx.Node]], held: Iterable[tuple[tuple[fx.Node, ...], int]]
) -> Parts:
    """Return the branches' parts. ``held``: the nodes of each weight, and its dim of experts."""
    each = len(orders) // space.size
    whole = [
        [p for n in order if n.op == "call_function" and (p := paths.product_of(n, lambda _: -1))]
        for order in orders[:each]
    ]
    edges = [paths.ends(products, space.above) for products in whole]
    weights = paths.weights_of(held, whole[0], *edges[0])
    first, made = list[fx.Node](), list[fx.Node]()
    for number, order in enumerate(orders):  # alike, so that products of the first expert's stand at the same places
        own = dict(zip(orders[number % each], order, strict=True))
        made += [own[p.node] for p in whole[number % each]]
        ones = [(p.node, p.node.all_input_nodes.index(p.x)) for p in edges[number % each][0]]
        first += _from_outside([own[node].all_input_nodes[at] for node, at in ones], order)
    return Parts(first, last, made, weights, capacity=_capacity(space, first))


def _from_outside(read: list[fx.Node], order: list[fx.Node]) -> list[fx.Node]:
    """Return the values that a branch reads beside its weights and values of these: tokens, before an expert's norm."""
    inside = set(order)
    own = set(walk([n for n in order if _is_own_weight(n, inside)], readers, into=inside.__contains__))
    found = [walk([x], operands, stop=lambda n: n not in own or is_weight(n)) for x in read]
    return [n for nodes in found for n in nodes if n not in own]


def _held(column: tuple[fx.Node, ...], size: int) -> tuple[tuple[fx.Node, ...], int]:
    """Return the weights that a column is, or the stack that it is the parts of, in order; and its dim of experts."""
    if is_parameter(column[0]):
        return column, -1
    stack, dim, _ = _weight_of(column[0])
    if stack is None or [*map(_weight_of, column)] != [(stack, dim, i) for i in range(shape_of(stack)[dim])]:
        raise _Unclear(f"the branches of its {size} numbers do not read parts of a stack in its order")
    return (stack,), dim


def _capacity(space: Space, first: list[fx.Node]) -> int:
    """Return the number of rows of each expert's part of one value, if all read such parts."""
    found = [pick_of(base(x)) for x in first]
    wholes = {pick.whole if pick is not None and pick.dim == space.dim(pick.whole) else None for pick in found}
    sizes = {x.meta["val"].numel() // shape_of(x)[-1] for x in first}
    return sizes.pop() if len(wholes) == len(sizes) == 1 and None not in wholes else 0
