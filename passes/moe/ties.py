"""Which dims of the operands and of the result of an op count the same things: those of one factor of its rule.

    y = a + b           y[.., i] with a[.., i] and b[.., i], unless a size is 1
    einsum("ecd,edh->ech")     a label with itself
    y = x.reshape(…)    by the stride with which a part of x's dim counts: [E·t, h] and [E, t, h]

A place is (node, dim, inner): of a dim of n, the index of the thing counted is (i // inner) % size. So a dim of a view
of a weight, or of a lookup in one, is traced to the parameter. One expert's part of a value is a single index of a dim,
by slice, select, or as one of the parts of a split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from operator import getitem
from typing import Any

from torch import Tensor, fx

from passes.program.ops import products
from passes.program.ops.aten import aten, named, packet_of, shape_of
from passes.program.ops.groups import CUTS, LAID_OUT, SPLITS
from passes.program.ops.products import PRODUCTS
from passes.program.weights import is_parameter, is_weight
from passes.rules.call import operands_of
from passes.rules.rule import RESULT, OpRule, Role
from passes.rules.table import rule_of

Tie = tuple[tuple[fx.Node, int], ...]
Place = tuple[int, int]  # dim, inner


def is_grouped(node: fx.Node) -> bool:
    """Whether it is the product of runs of rows, each with its own matrix: (x[t, i], W[e, i, o], ends[e])."""
    return products.is_grouped(node.target) and len(node.all_input_nodes) == 3


def is_product(node: fx.Node) -> bool:
    return node.target in PRODUCTS or is_grouped(node)


class Ties:
    """Owns the rules of the calls that were asked for."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, OpRule | None] = {}

    def next_to(self, node: fx.Node, place: Place, size: int) -> Iterator[tuple[fx.Node, Place]]:
        """Places that count the same, one call away."""
        for call in (node, *node.users):
            yield from self.through(call, node, place, size)

    def through(self, call: fx.Node, node: fx.Node, place: Place, size: int) -> Iterator[tuple[fx.Node, Place]]:
        """Places of ``call`` and its operands that count the same as one of ``node``, which is among them."""
        if call not in self._known:
            self._known[call] = rule_of(call)
        rule = self._known[call]
        places = _values(call) if rule is not None else {}
        for source, target in permutations(places, 2):
            if rule is not None and places[source] is node and places[target] is not node:
                found = rule.carried(source, *place, size, target)
                if found is not None:
                    yield places[target], found


def _values(call: fx.Node) -> dict[int, fx.Node]:
    return dict(enumerate(operands_of(call))) | {RESULT: call}


def ties(node: fx.Node) -> list[Tie]:
    """Dims of a call and of its operands that count the same, position by position."""
    rule = rule_of(node)
    if rule is None:
        return []
    places = _values(node)
    whole = [[p for p in factor.places if rule.sole(p.operand, p.dim) is factor] for factor in rule.factors]
    return [tuple(dict.fromkeys((places[p.operand], p.dim) for p in tie)) for tie in whole if len(tie) > 1]


def lookup(node: fx.Node) -> tuple[fx.Node, int, fx.Node] | None:
    """(table, its dim, ids) of a call that reads full slices of a table by one tensor of ids."""
    if packet_of(node.target) not in (aten.embedding, aten.index_select, aten.index):
        return None
    rule, read = rule_of(node), operands_of(node)
    mixed = [place for f in rule.factors if f.role is Role.MIX and (place := f.at(0))] if rule is not None else []
    return (read[0], mixed[0].dim, read[1]) if len(read) == 2 and len(mixed) == 1 else None


# ---- one expert's part of a value, and the weight that a value is a view of


@dataclass(frozen=True, slots=True)
class Pick:
    """``node``: index ``number`` of ``whole`` along ``dim``; ``keeps``: as a dim of size 1."""

    node: fx.Node
    whole: fx.Node
    dim: int
    number: int
    keeps: bool


def pick_of(node: fx.Node) -> Pick | None:
    """None for a call that takes anything else."""
    call = node.all_input_nodes[0] if node.target is getitem else node
    if call.target not in (SPLITS if node.target is getitem else CUTS):
        return None
    whole, given = call.all_input_nodes[0], named(call)
    dim = int(given.get("dim") or 0) % len(shape_of(whole))
    size, keeps = shape_of(whole)[dim], len(shape_of(node)) == len(shape_of(whole))
    is_one = len(call.meta["val"]) == size if node.target is getitem else not keeps or shape_of(node)[dim] == 1
    number: Any = node.args[1] if node.target is getitem else given.get("index", given.get("start")) or 0
    return Pick(node, whole, dim, number % size, keeps) if is_one else None


def picks(whole: fx.Node, dim: int) -> Iterator[Pick]:
    """All of a value along a dim."""
    parts = [part for user in whole.users if user.target in SPLITS for part in user.users]
    for node in (*whole.users, *parts):
        found = pick_of(node)
        if found is not None and (found.whole, found.dim) == (whole, dim):
            yield found


def pick_of_weight(node: fx.Node) -> Pick | None:
    """One expert's matrix of a stack, or its values of a table; None for other values."""
    found = pick_of(node) if node.op == "call_function" else None
    return found if found is not None and is_parameter(found.whole) else None


def origin_of(node: fx.Node, dim: int) -> tuple[fx.Node, int] | None:
    """The parameter and its dim that a dim of a value so made is; None for others. A value computed of weights is a
    changed weight if it has all its dims.
    """
    while not is_parameter(node):
        if node.target is getitem and (pick := pick_of_weight(node)) is not None:
            return (pick.whole, dim) if pick.keeps and dim != pick.dim else None
        source = _source_of(node)
        up = [d for tie in ties(node) if (node, dim) in tie for n, d in tie if n is source]
        if source is None or len(up) != 1:
            return None
        node, dim = source, up[0]
    return node, dim


def _source_of(node: fx.Node) -> fx.Node | None:
    """The weight that ``node`` is a view or a change of, or a value that is one of a weight."""
    values = [n for n in node.all_input_nodes if isinstance(n.meta["val"], Tensor)]
    floats = [n for n in values if n.meta["val"].dtype.is_floating_point]
    if is_view(node):
        found = floats if len(floats) == 1 else []
    else:
        found = [n for n in floats if _has_all_dims(node, n)] if is_weight(node) else []
    return next((n for n in found if _is_of_weight(n) or _source_of(n) is not None), None)


def _is_of_weight(node: fx.Node) -> bool:
    return is_parameter(node) or pick_of_weight(node) is not None


def _has_all_dims(node: fx.Node, source: fx.Node) -> bool:
    held = [(dict(tie).get(node), dict(tie).get(source)) for tie in ties(node)]
    pairs = {(there, here) for there, here in held if there is not None and here is not None}
    return len(pairs) == len(shape_of(node)) == len(shape_of(source))


def is_view(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    packet = packet_of(node.target)
    is_one = packet is aten.select or (packet is aten.slice and shape_of(node)[int(named(node)["dim"])] == 1)
    return is_one or node.target in LAID_OUT or lookup(node) is not None
