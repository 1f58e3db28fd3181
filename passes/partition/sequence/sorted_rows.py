"""Rows that a model sorts by expert, of which each rank of cp sorts its own: their known calls, and their typings.

A model may find the order of its rows in any way. What equals one of these for random choices is replaced by it, as
these calls, and no others, may be computed of a rank's pairs of token and choice alone:

    order   sort(choices)     pairs of token and choice, by expert       expert   choices[order]
    token   order // k        the token of each of them                  counts   of the rows of each expert
    places  sort(order)       the place of each pair in the order        ends     cumsum(counts)

    rows = x[token], w[order]      of a rank's tokens: its rows, in an order of its own
    products, ops row by row       as of any sharded rows; rows in an order and rows of tokens are never mixed
    y[places]                      a rank's pairs, in the order of its tokens
    zeros.index_add(0, token, y)   a rank's tokens
    counts, ends                   of a rank's rows: partial sums, of which its grouped products read its own

An order is that of one rank: no other op may read values that count rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from passes.moe import exchange
from passes.moe.layers import Dispatch, Experts
from passes.moe.opening import Exchange
from passes.moe.routing import Routing
from passes.partition.sequence.facts import no_typing
from passes.partition.sequence.rules import options_over_cp
from passes.partition.typings.base import Form, Option, Site
from passes.program.builder import Builder, erase_unread
from passes.program.ops.aten import aten, packet_of, shape_of
from passes.program.ops.groups import is_grouped
from passes.program.program import Program
from passes.program.walks import readers, walk
from passes.types.types import P, Placement, R, V

Sorted = Mapping[fx.Node, str]  # the known calls: "order", "token" and "places", and the "sort" that an order is of


def sort_plainly(program: Program, experts: Experts) -> Sorted:
    """Rewrite ``program`` at each layer with rows that are sorted by expert."""
    found: dict[fx.Node, str] = {}
    for layer in experts.layers:
        routing = Routing(layer.num_experts, [program.node(name) for name in layer.chosen], layer.top_k)
        if layer.dispatch is Dispatch.OFFSETS and len(routing.chosen) == 1:
            _Layer(program, routing, program.node(layer.combined), found).rewrite()
    return found


class _Layer:
    """Owns the known calls of one layer, each of which is made when it is wanted."""

    def __init__(self, program: Program, routing: Routing, combined: fx.Node, found: dict[fx.Node, str]) -> None:
        self.graph, self.routing, self.found = program.graph.graph, routing, found
        (self.chosen,) = routing.chosen
        self.combined = combined
        self.build = Builder(self.graph, self.chosen.next, self.chosen)
        self.rows = Exchange(self.build, routing)
        self.made: dict[tuple[str, torch.dtype], fx.Node] = {}

    def rewrite(self) -> None:
        """Replace values that depend on the choices alone by the known ones."""
        names, order = dict[fx.Node, str](), self.chosen
        for node in sorted(walk([self.chosen], readers, into=lambda n: n <= self.combined)):
            name = self._name_of(node, order)
            if name:
                names[node] = name
                order = node if name == "order" and order is self.chosen else order
        for node, name in names.items():
            node.replace_all_uses_with(self._as(name, node.meta["val"].dtype))
        made = vars(self.rows)
        for name in (name for name in ("order", "token", "places") if name in made):
            sorts = () if name == "token" else made[name].all_input_nodes
            self.found |= {made[name]: name} | dict.fromkeys(sorts, "sort")
        erase_unread(self.graph, names)

    def _name_of(self, node: fx.Node, order: fx.Node) -> str:
        """``order``: that of the rows; the choices, while it is not known."""
        value = node.meta.get("val")
        sizes = {(self.routing.num_rows,), (self.routing.size,)}
        is_of_ids = isinstance(value, Tensor) and tuple(value.shape) in sizes and not node.meta.get("grad")
        if node is self.chosen or not is_of_ids:
            return ""
        left = ["order", "token", "places", "expert", "counts", "ends"]

        def holds(found: list[Tensor], counts: Tensor, ids: list[Tensor]) -> bool:
            value, flat, given = found[0].long(), ids[0].reshape(-1), found[1].reshape(-1)
            if order is self.chosen:  # the first order of the rows: those of one expert may stand in any
                given = value if _sorts(value, flat) else None
            known = {"expert": torch.sort(flat).values, "counts": counts, "ends": counts.cumsum(0)}
            if given is not None:
                known |= {"order": given, "token": given // self.routing.top_k, "places": torch.argsort(given)}
            left[:] = [name for name in left if name in known and torch.equal(value, known[name])]
            return bool(left)

        return left[0] if self.routing.holds([node, order], holds) else ""

    def _as(self, name: str, dtype: torch.dtype) -> fx.Node:
        node = getattr(self.rows, name)
        if node.meta["val"].dtype == dtype:
            return node
        if (name, dtype) not in self.made:
            self.made[name, dtype] = self.build.call(aten.to.dtype, node, dtype)
        return self.made[name, dtype]


def _sorts(value: Tensor, flat: Tensor) -> bool:
    """Return whether it is an order of all rows, by expert."""
    if value.shape != flat.shape or not torch.equal(torch.sort(value).values, torch.arange(len(flat))):
        return False
    return torch.equal(flat[value], torch.sort(flat).values)


# ---- typings


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
        if node in self.known:
            return self._as_given(node, self.natives[inputs[0]])
        is_offset = inputs[0] in self.counts and packet_of(node.target) in (aten.cumsum, aten.to)
        if node.target is exchange.count_experts or is_offset:
            self.counts.add(node)
            return self._as_given(node, P)
        if any(self._counts_rows(n) for n in inputs):
            return self._indexed(node)
        if any(n in self.inside for n in inputs):
            return self._inside(node)
        return None

    def _counts_rows(self, node: fx.Node) -> bool:
        return self.known.get(node) in ("order", "token", "places")

    def _as_given(self, node: fx.Node, out: Placement, **given: Placement) -> Option:
        """Return every operand in the type that it has."""
        args = tuple(given.get(n.name, self.natives.get(n, R)) for n in node.all_input_nodes)
        if any(t.has_whole_segment for t in args):
            raise no_typing(node)
        return Option(args, out, Form.PARTS)

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
        is_back = self.known.get(first) == "places"
        if rows is None or rows.dim != 0 or (x in self.inside) is not is_back or not self._fit(first, shape_of(x)[0]):
            return None
        if any(i not in self.inside and self.known.get(i) != "order" for i in more) or (is_back and more):
            return None
        if not is_back:
            self.inside.add(node)
        return self._as_given(node, self.natives[first])

    def _fit(self, index: fx.Node, size: int) -> bool:
        """Return whether an index counts ``size`` rows: a pair each, or each a token with its choices."""
        return self._counts_rows(index) and shape_of(index) == (size * self._times(index),)

    def _times(self, index: fx.Node) -> int:
        return index.args[1] if self.known.get(index) == "token" else 1  # pyright: ignore[reportReturnType]

    def _added(self, node: fx.Node) -> Option | None:
        args: Any = node.args
        base, dim, index, rows = args[:4]
        is_before = self.known.get(index) in ("order", "token")
        if dim != 0 or not is_before or rows not in self.inside or base in self.inside:
            return None
        if not self._fit(index, shape_of(base)[0]):
            return None
        out = V(0, *(n // self._times(index) for n in self.natives[index].sizes))
        return self._as_given(node, out, **{base.name: out})

    # ---- inside an order

    def _inside(self, node: fx.Node) -> Option:
        """Type an op inside an order row by row: no sharded operand is of another order, and none is converted."""
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
