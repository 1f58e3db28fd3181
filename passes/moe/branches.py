"""Experts that stand side by side in the graph, one branch each, as a loop over modules leaves them.

    combined[t] = Σ_e  g_e[t] · branch_e(tokens)[t]        g_e: the router's weight of expert e alone

Branches are those of one layer if they are equal except for their own weights, and each number has one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import fx

from passes.moe.layers import ExpertWeight
from passes.moe.paths import ends, product_of, sides
from passes.moe.rows import stays_zero
from passes.moe.space import Space
from passes.moe.ties import pick_of, pick_of_weight, picks
from passes.program.ops.aten import aten, shape_of
from passes.program.ops.groups import JOINS, LAID_OUT
from passes.program.walks import in_order, operands, walk
from passes.program.weights import is_parameter, is_weight
from passes.rules.table import rule_of


@dataclass(frozen=True, slots=True)
class Branches:
    """``first``: what the inputs of the first products are made of; ``last``: the summands, in the experts' order.
    ``capacity``: the number of rows that each reads of its own part of a value with a dim of experts; 0 if all read
    the same rows.
    """

    first: list[fx.Node]
    last: list[fx.Node]
    products: list[fx.Node]
    weights: list[ExpertWeight]
    capacity: int = 0


def branches_of(space: Space) -> Branches | str | None:
    """The experts' branches; why they are none; None if weights do not belong to numbers."""
    values = _values_of_one(space)
    tips = {n: e for n, e in values.items() if any(u not in values for u in n.users) or not n.users}
    own = _own(space, tips)
    tips = {n: e for n, e in tips.items() if any(_is_own_weight(w, own[n]) and len(shape_of(w)) > 1 for w in own[n])}
    if len(set(tips.values())) < 2:
        return None
    each = len(tips) // space.size  # one, or one for each choice of a token
    if sorted(tips.values()) != sorted([*range(space.size)] * each):
        return f"they have weights for {len(set(tips.values()))} of its {space.size} numbers, in {len(tips)} branches"
    last = sorted(tips, key=lambda n: (tips[n], n))
    orders = [in_order([n], step=lambda x, own=own[n]: [y for y in operands(x) if y in own]) for n in last]
    for first in range(each):
        numbers = [tips[tip] for tip in last[first::each]]
        if not _are_alike(numbers, orders[first::each], values):
            return f"the branches of its {space.size} numbers differ from each other"
    if any(_weights(orders[i]) != _weights(orders[i // each * each]) for i in range(len(orders))):
        return f"the branches of one of its {space.size} numbers have different weights"
    columns = [column for column in zip(*orders[::each], strict=True) if _is_own_weight(column[0], orders[0])]
    if not all(_are_parts(column, space.size) for column in columns if not is_parameter(column[0])):
        return f"the branches of its {space.size} numbers do not read parts of a stack in its order"
    return _branches(space, last, orders, columns)


def _weights(order: list[fx.Node]) -> set[tuple[str, int]]:
    """Of a branch: names, and for part of a stack its number."""
    parts = [pick for n in order if (pick := pick_of_weight(n)) is not None]
    return {(n.name, -1) for n in order if is_parameter(n)} | {(pick.whole.name, pick.number) for pick in parts}


def _is_own_weight(node: fx.Node, own: Collection[fx.Node]) -> bool:
    """Whether it is a weight of one branch alone, or that branch's part of a stack."""
    pick = pick_of_weight(node)
    return is_parameter(node) or (pick is not None and pick.whole not in own)


def _are_parts(column: Sequence[fx.Node], size: int) -> bool:
    """Whether weights are the parts of one stack, in order."""
    found = [pick_of_weight(node) for node in column]
    numbers = [pick.number for pick in found if pick is not None]
    places = {(pick.whole, pick.dim, shape_of(pick.whole)[pick.dim]) for pick in found if pick is not None}
    return numbers == list(range(size)) and len(places) == 1 and next(iter(places))[2] == size


# ---- values of one expert alone


def _values_of_one(space: Space) -> dict[fx.Node, int]:
    """Value → the number of its expert: values that test for one number, and those made of them before any sum."""
    known: dict[fx.Node, int] = {}
    work = list(_asked(space))
    while work:
        node, number = work.pop()
        if node in known:
            continue
        known[node] = number
        work += [(user, number) for user in node.users if _passes(user, known, number)]
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
    """Whether a call's result is of that number alone: made of its values and weights, or zero where these are."""
    if user.op != "call_function" or any(known.get(n, number) != number for n in user.all_input_nodes):
        return False
    if user.target is aten.add.Tensor and user.args[1] == 0:
        return False  # sum() begins with 0
    if user.target in JOINS and is_weight(user) and not all(n in known for n in user.all_input_nodes):
        return False  # the weights of all numbers in one
    is_own = all(n in known or is_weight(n) for n in user.all_input_nodes)
    return (is_own and rule_of(user) is not None) or stays_zero(user, known)


# ---- values of one branch alone


def _own(space: Space, tips: Mapping[fx.Node, int]) -> dict[fx.Node, set[fx.Node]]:
    """For each value its ancestors that no value of another number has."""

    def is_near(node: fx.Node) -> bool:
        return is_weight(node) or node not in space.above

    above = {n: set(walk([n], operands, into=is_near)) for n in tips}
    holders: dict[fx.Node, set[int]] = {}
    for tip, nodes in above.items():
        for node in nodes:
            holders.setdefault(node, set()).add(tips[tip])
    return {tip: {n for n in nodes if len(holders[n]) == 1} for tip, nodes in above.items()}


def _are_alike(numbers: list[int], orders: list[list[fx.Node]], values: Mapping[fx.Node, int]) -> bool:
    """Whether the branches of all numbers compute the same; each may take the part of its number of another value."""
    plain = {_form(order, None, values) for order in orders}
    return len(plain) == 1 or len({_form(*given, values) for given in zip(orders, numbers, strict=True)}) == 1


def _form(order: list[fx.Node], number: int | None, values: Mapping[fx.Node, int]) -> tuple[Any, ...]:
    """The computation of a branch, without the names of its own values and its number. ``number``: if it takes that
    part of other values."""
    position = {node: i for i, node in enumerate(order)}

    def line(node: fx.Node) -> tuple[Any, ...]:
        if node.op == "placeholder" or _is_own_weight(node, position):
            return ("weight", shape_of(node), str(node.meta["val"].dtype))
        pick = None if number is None else pick_of(node)
        if pick is not None and pick.number == number and pick.whole not in position:
            return ("part", pick.whole.name, pick.dim, pick.keeps)
        asks = node in values and not any(n in values for n in node.all_input_nodes)
        given = (node.args[:1] if asks else node.args, dict(node.kwargs))
        return (str(node.target), shape_of(node), repr(fx.map_arg(given, lambda n: f"<{position.get(n, n.name)}>")))

    return tuple(line(node) for node in order)


def _branches(
    space: Space, last: list[fx.Node], orders: list[list[fx.Node]], columns: list[tuple[fx.Node, ...]]
) -> Branches:
    """``columns``: each weight of the branches, in the order of the numbers."""
    whole = [[p for n in order if n.op == "call_function" and (p := product_of(n, lambda _: -1))] for order in orders]
    edges = [ends(products, space.above) for products in whole]
    held = list(dict.fromkeys(_held(column) for column in columns))
    order_of = {p.weight: i for i, p in enumerate(whole[0])}
    held.sort(key=lambda nodes: order_of.get(nodes[0][0], len(order_of)))
    side_of = {p.weight: sides(p, *edges[0]) for p in whole[0]}
    weights = [
        ExpertWeight(names_of(nodes), shape_of(nodes[0]), dim, *side_of.get(nodes[0], (-1, -1, "")))
        for nodes, dim in held
    ]
    given = [
        _from_outside(p.x, own) for (ones, _), own in zip(edges, map(_made_of_own, orders), strict=True) for p in ones
    ]
    first = [node for nodes in given for node in nodes]
    return Branches(first, last, [p.node for ps in whole for p in ps], weights, _capacity(space, first))


def _made_of_own(order: list[fx.Node]) -> set[fx.Node]:
    """The weights of a branch, and its values that are made of them."""
    own, found = set(order), set[fx.Node]()
    for node in order:
        if _is_own_weight(node, own) or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _from_outside(x: fx.Node, own: Set[fx.Node]) -> list[fx.Node]:
    """What a value made of a branch's weights reads beside them: tokens, before the norm of an expert."""
    found = walk([x], operands, stop=lambda n: n not in own or is_weight(n))
    return [n for n in found if n not in own]


def _held(column: tuple[fx.Node, ...]) -> tuple[tuple[fx.Node, ...], int]:
    """The weights that a column is, or the stack that it is the parts of, and its dim of experts."""
    pick = None if is_parameter(column[0]) else pick_of_weight(column[0])
    return (column, -1) if pick is None else ((pick.whole,), pick.dim)


def _capacity(space: Space, first: list[fx.Node]) -> int:
    """The number of rows of each expert's part of one value, if all read such parts."""
    wholes = {_whole_of(space, x) for x in first}
    sizes = {x.meta["val"].numel() // shape_of(x)[-1] for x in first}
    return sizes.pop() if len(wholes) == len(sizes) == 1 and None not in wholes else 0


def _whole_of(space: Space, x: fx.Node) -> fx.Node | None:
    """The value with ``x`` as one expert's part."""
    while x.target in LAID_OUT:
        x = x.all_input_nodes[0]
    pick = pick_of(x)
    return pick.whole if pick is not None and pick.dim == space.dim(pick.whole) else None


def names_of(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)
