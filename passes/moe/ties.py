"""Which dims of the operands and of the result of an op count the same things: those of one factor of its rule.

    y = a + b           y[.., i] with a[.., i] and b[.., i], unless a size is 1
    einsum("ecd,edh->ech")     a label with itself
    y = x.reshape(…)    by the stride with which a part of x's dim counts: [E·t, h] and [E, t, h]

A place is (node, dim, inner): of a dim of n, the index of the thing counted is (i // inner) % size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from torch import fx

from passes.program.ops import products
from passes.program.ops.aten import aten, packet_of
from passes.program.ops.products import PRODUCTS
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
