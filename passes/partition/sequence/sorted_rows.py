"""The typings of rows that are sorted by expert, of which each rank of cp sorts its own.

    rows = x[tokens], w[pairs]     of a rank's tokens: its rows, in an order of its own
    products, ops row by row       as of any sharded rows; rows in an order and rows of tokens are never mixed
    y[places]                      a rank's pairs of token and choice, in the order of its tokens
    zeros.index_add(0, tokens, y)  a rank's tokens
    counts, ends                   of a rank's rows: partial sums, of which its grouped products read its own

An order is that of one rank: no other op may read values that count rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

from torch import fx

from passes.moe import exchange
from passes.moe.sorting import Sorted
from passes.partition.options.base import Option, Site
from passes.partition.options.forms import Form
from passes.partition.sequence.refusals import no_typing
from passes.partition.sequence.rules import options_over_cp
from passes.program.ops.aten import aten, packet_of, shape_of
from passes.program.ops.products import is_grouped
from passes.types.types import P, Placement, R, V

LINEAR = {aten.cumsum, aten.to}


@dataclass
class SortedRows:
    """Owns which values are rows ``inside`` an order, which are ``counts`` of such rows, and the types so far."""

    known: Sorted
    ranks: int
    natives: dict[fx.Node, Placement]
    inside: set[fx.Node] = field(default_factory=set)
    counts: set[fx.Node] = field(default_factory=set)

    def option(self, node: fx.Node) -> Option | None:
        """The typing of a call that makes or reads such rows; None for any other. Raises PlanError if it mixes them."""
        inputs = node.all_input_nodes
        if self._sorts(node):
            return self._as_given(node, self.natives[inputs[0]])
        if node.target is exchange.count_experts or (inputs[0] in self.counts and packet_of(node.target) in LINEAR):
            self.counts.add(node)
            return self._as_given(node, P)
        if any(self._counts_rows(n) for n in inputs):
            return self._indexed(node)
        if any(n in self.inside for n in inputs):
            return self._inside(node)
        return None

    def _sorts(self, node: fx.Node) -> bool:
        sorts = self.known.sorts
        return node in sorts or node in self.known.tokens or (node.target is getitem and node.args[0] in sorts)

    def _counts_rows(self, node: fx.Node) -> bool:
        return node in self.known.pairs or node in self.known.tokens or node in self.known.places

    def _as_given(self, node: fx.Node, out: Placement, **given: Placement) -> Option:
        """Every operand in the type that it has."""
        args = (given.get(n.name, self.natives.get(n, R)) for n in node.all_input_nodes)
        return Option(tuple(args), out, Form.PARTS)

    # ---- into an order, and out of it

    def _indexed(self, node: fx.Node) -> Option:
        packet = packet_of(node.target)
        option = (
            self._gathered(node) if packet is aten.index else self._added(node) if packet is aten.index_add else None
        )
        if option is None:
            raise no_typing(node)
        return option

    def _gathered(self, node: fx.Node) -> Option | None:
        """x[i], x[i, ids]: rows of tokens or pairs in the order, or back from it."""
        args: Any = node.args
        x, (first, *more) = args
        rows = self.natives.get(x)
        is_back = first in self.known.places
        if rows is None or rows.dim != 0 or (x in self.inside) is not is_back or not self._fit(first, shape_of(x)[0]):
            return None
        if any(i not in self.inside and i not in self.known.pairs for i in more) or (is_back and more):
            return None
        if not is_back:
            self.inside.add(node)
        return self._as_given(node, self.natives[first])

    def _fit(self, index: fx.Node, size: int) -> bool:
        """Whether an index counts ``size`` rows: a pair each, or each a token with its choices."""
        return self._counts_rows(index) and shape_of(index) == (size * self._times(index),)

    def _times(self, index: fx.Node) -> int:
        times: Any = index.args[1] if index in self.known.tokens else 1
        return times

    def _added(self, node: fx.Node) -> Option | None:
        args: Any = node.args
        base, dim, index, rows = args[:4]
        is_before = index in self.known.tokens or index in self.known.pairs
        if dim != 0 or not is_before or rows not in self.inside or base in self.inside:
            return None
        if not self._fit(index, shape_of(base)[0]):
            return None
        out = V(0, *(n // self._times(index) for n in self.natives[index].sizes))
        return self._as_given(node, out, **{base.name: out})

    # ---- inside an order

    def _inside(self, node: fx.Node) -> Option:
        """Row by row: no sharded operand is of another order, and all are read as they are."""
        sharded = [n for n in node.all_input_nodes if n in self.natives and n not in self.counts]
        option = next(self._of_rows(node), None)
        if option is None or not all(n in self.inside for n in sharded):
            raise no_typing(node)
        self.inside.add(node)
        return option

    def _of_rows(self, node: fx.Node) -> Iterator[Option]:
        if is_grouped(node.target):
            rows, _, ends = node.all_input_nodes[:3]
            if ends in self.counts and self.natives[rows].dim == 0:
                yield self._as_given(node, self.natives[rows])
            return
        site = Site(node, self.ranks, {n.name: {self.natives[n]} for n in node.all_input_nodes if n in self.natives})
        for option in options_over_cp(site):
            pairs = zip(site.inputs, option.args, strict=True)
            if option.out.is_sharded and all(
                t == self.natives[n] if n in self.natives else t.kind in "IR" for n, t in pairs
            ):
                yield option
