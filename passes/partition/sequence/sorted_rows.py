"""The typings of rows that are sorted by expert, of which each rank of cp sorts its own.

    rows = x[tokens], w[pairs]     of a rank's tokens: its rows, in an order of its own
    products, ops row by row       as of any sharded rows; rows in their order and tokens are never mixed
    y[places]                      a rank's pairs of token and choice, in the order of its tokens
    counts, ends                   of a rank's rows: partial sums, of which its grouped products read its own

An order is that of one rank: no value that counts rows may be read by any other op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import getitem

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

LINEAR = {aten.cumsum, aten.to, aten.reshape}


@dataclass
class SortedRows:
    """Owns which values are rows ``inside`` an order, and which are ``counts`` of such rows."""

    known: Sorted
    inside: set[fx.Node] = field(default_factory=set)
    counts: set[fx.Node] = field(default_factory=set)

    def option(self, node: fx.Node, natives: dict[fx.Node, Placement], ranks: int) -> Option | None:
        """The typing of a call that makes or reads such rows; None for any other. Raises PlanError if it mixes them."""
        inputs = node.all_input_nodes
        counting = self.known.pairs | self.known.tokens | self.known.places
        if node in self.known.sorts or (node.target is getitem and inputs[0] in self.known.sorts):
            return self._as_given(node, natives, natives[inputs[0]])
        if node in self.known.tokens:
            return self._as_given(node, natives, natives[inputs[0]])
        if node.target is exchange.count_experts or (inputs[0] in self.counts and packet_of(node.target) in LINEAR):
            self.counts.add(node)
            return self._as_given(node, natives, P)
        if any(n in counting for n in inputs):
            return self._indexed(node, natives, counting)
        if any(n in self.inside for n in inputs):
            return self._inside(node, natives, ranks)
        return None

    @staticmethod
    def _as_given(node: fx.Node, natives: dict[fx.Node, Placement], out: Placement) -> Option:
        return Option(tuple(natives.get(n, R) for n in node.all_input_nodes), out, Form.PARTS)

    def _indexed(self, node: fx.Node, natives: dict[fx.Node, Placement], counting: set[fx.Node]) -> Option:
        """x[i], and a sum of rows into zeros at i."""
        x, given = node.args[:2]
        if packet_of(node.target) is aten.index and x not in counting and all(given):  # pyright: ignore
            return self._gathered(node, x, list(given), natives)  # pyright: ignore
        if packet_of(node.target) is aten.index_add and self._adds(node):
            return self._added(node, natives)
        raise no_typing(node)

    def _gathered(self, node: fx.Node, x: fx.Node, indices: list[fx.Node], natives: dict[fx.Node, Placement]) -> Option:
        first, *more = indices
        rows = natives.get(x)
        is_out = first in self.known.places
        wanted = len(shape_of(first)) == 1 and rows is not None and rows.is_sharded and rows.dim == 0
        if not wanted or (x in self.inside) is not is_out or not self._counts(first, x):
            raise no_typing(node)
        if any(i not in self.inside and i not in self.known.pairs for i in more) or (is_out and more):
            raise no_typing(node)
        if not is_out:
            self.inside.add(node)
        return self._as_given(node, natives, natives[first])

    def _counts(self, index: fx.Node, x: fx.Node) -> bool:
        """Whether an index counts the rows of ``x``."""
        size = shape_of(x)[0]
        if index in self.known.tokens:
            order, top_k = index.args
            return size * int(top_k) == shape_of(order)[0]  # pyright: ignore
        return index in self.known.pairs | self.known.places and size == shape_of(index)[0]

    def _adds(self, node: fx.Node) -> bool:
        _, dim, index, rows = node.args[:4]
        return dim == 0 and index in self.known.tokens and rows in self.inside

    def _added(self, node: fx.Node, natives: dict[fx.Node, Placement]) -> Option:
        base, _, index, rows = node.args[:4]
        cut = natives[index]  # pyright: ignore
        top_k = int(index.args[1])  # pyright: ignore
        out = V(0, *(n // top_k for n in cut.sizes))
        given = {**natives, base: out}
        return Option(tuple(given.get(n, R) for n in node.all_input_nodes), out, Form.PARTS)

    def _inside(self, node: fx.Node, natives: dict[fx.Node, Placement], ranks: int) -> Option:
        """Row by row: no sharded operand is of another order, and all are read as they are."""
        cut = [n for n in node.all_input_nodes if n in natives and n not in self.counts]
        if not all(n in self.inside for n in cut):
            raise no_typing(node)
        option = next(self._of_rows(node, natives, ranks), None)
        if option is None:
            raise no_typing(node)
        self.inside.add(node)
        return option

    def _of_rows(self, node: fx.Node, natives: dict[fx.Node, Placement], ranks: int) -> Iterator[Option]:
        if is_grouped(node.target):
            rows, _, ends = node.all_input_nodes[:3]
            if ends in self.counts and natives[rows].dim == 0:
                yield self._as_given(node, natives, natives[rows])
            return
        site = Site(node, ranks, {n.name: {natives[n]} for n in node.all_input_nodes if n in natives})
        for option in options_over_cp(site):
            if option.out.is_sharded and all(
                t == natives[n] if n in natives else not t.is_sharded and t != P
                for n, t in zip(site.inputs, option.args, strict=True)
            ):
                yield option
