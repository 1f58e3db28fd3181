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

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    """Rewrite ``program`` at each layer with rows that are sorted by expert; return the known calls."""
    found: dict[fx.Node, str] = {}
    for layer in experts.layers:
        if layer.dispatch is Dispatch.OFFSETS and len(layer.chosen) == 1:
            routing = Routing(layer.num_experts, [program.node(layer.chosen[0])], layer.top_k)
            found |= _rewritten(routing, _names(routing, program.node(layer.combined)))
    return found


def _names(routing: Routing, combined: fx.Node) -> dict[fx.Node, str]:
    """Return the values before ``combined`` that depend on the choices alone and equal a known one, with its name."""
    names, order = dict[fx.Node, str](), None
    sizes = {(routing.num_rows,), (routing.size,)}
    for node in sorted(walk(routing.chosen[0].users, readers, into=lambda n: n <= combined)):
        value = node.meta.get("val")
        is_of_ids = isinstance(value, Tensor) and tuple(value.shape) in sizes and not node.meta.get("grad")
        if is_of_ids and (name := routing.name_of(node, order)):
            names[node] = name
            order = order or (node if name == "order" else None)
    return names


def _rewritten(routing: Routing, names: dict[fx.Node, str]) -> Sorted:
    """Put known calls, each made when it is wanted, in the place of values with these names."""
    (chosen,) = routing.chosen
    rows, casts = Exchange(Builder(chosen.graph, chosen.next, chosen), routing), dict[Any, fx.Node]()
    for node, name in names.items():
        known, dtype = getattr(rows, name), node.meta["val"].dtype
        if known.meta["val"].dtype != dtype and (name, dtype) not in casts:
            casts[name, dtype] = rows.build.call(aten.to.dtype, known, dtype)
        node.replace_all_uses_with(casts.get((name, dtype)) or known)
    made = {node: name for name, node in vars(rows).items() if name in ("order", "token", "places")}
    sorts = [node.all_input_nodes[0] for node, name in made.items() if name != "token"]
    erase_unread(chosen.graph, names)
    return made | dict.fromkeys(sorts, "sort")


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
        """Return the typing of a call that makes or reads such rows; None for others. PlanError if it mixes them."""
        inputs = node.all_input_nodes
        if node in self.known:
            return self._as_given(node, self.natives[inputs[0]])
        is_offset = inputs[0] in self.counts and packet_of(node.target) in (aten.cumsum, aten.to)
        if node.target is exchange.count_experts or is_offset:
            self.counts.add(node)
            return self._as_given(node, P)
        if any(self._counts_rows(n) for n in inputs):
            packet = packet_of(node.target)
            if packet not in (aten.index, aten.index_add):
                raise no_typing(node)
            return self._gathered(node) if packet is aten.index else self._added(node)
        return self._inside(node) if any(n in self.inside for n in inputs) else None

    def _counts_rows(self, node: fx.Node) -> bool:
        return self.known.get(node) in ("order", "token", "places")

    def _as_given(self, node: fx.Node, out: Placement, **given: Placement) -> Option:
        """Return the typing that reads every operand in the type that it has."""
        args = tuple(given.get(n.name, self.natives.get(n, R)) for n in node.all_input_nodes)
        if any(t.has_whole_segment for t in args):
            raise no_typing(node)
        return Option(args, out, Form.PARTS)

    # ---- into an order, and out of it

    def _gathered(self, node: fx.Node) -> Option:
        """Type x[i], x[i, ids]: rows of tokens or pairs in the order, or back from it."""
        args: Any = node.args
        x, (first, *more) = args
        rows, is_back = self.natives.get(x), self.known.get(first) == "places"
        is_of_rows = rows is not None and rows.dim == 0 and (x in self.inside) is is_back
        in_order = not more or (not is_back and all(i in self.inside or self.known.get(i) == "order" for i in more))
        if not is_of_rows or not in_order or not self._fit(first, shape_of(x)[0]):
            raise no_typing(node)
        if not is_back:
            self.inside.add(node)
        return self._as_given(node, self.natives[first])

    def _fit(self, index: fx.Node, size: int) -> bool:
        """Return whether an index counts ``size`` rows: a pair each, or each a token with its choices."""
        return self._counts_rows(index) and shape_of(index) == (size * self._times(index),)

    def _times(self, index: fx.Node) -> int:
        return index.args[1] if self.known.get(index) == "token" else 1  # pyright: ignore[reportReturnType]

    def _added(self, node: fx.Node) -> Option:
        args: Any = node.args
        base, dim, index, rows = args[:4]
        is_before = self.known.get(index) in ("order", "token") and self._fit(index, shape_of(base)[0])
        if dim != 0 or not is_before or rows not in self.inside or base in self.inside:
            raise no_typing(node)
        out = V(0, *(n // self._times(index) for n in self.natives[index].sizes))
        return self._as_given(node, out, **{base.name: out})

    # ---- inside an order

    def _inside(self, node: fx.Node) -> Option:
        """Type a call row by row: no sharded operand is of another order, and all are read unchanged."""
        given = {n: self.natives[n] for n in node.all_input_nodes if n in self.natives}
        if is_grouped(node.target):
            rows, _, ends = node.all_input_nodes[:3]
            found = [self._as_given(node, given[rows])] if ends in self.counts and given[rows].dim == 0 else []
        else:
            site = Site(node, self.ranks, {n.name: {t} for n, t in given.items()})
            found = [o for o in options_over_cp(site) if o.out.is_sharded and _as_they_are(site, o, given)]
        if not found or any(n not in self.inside and n not in self.counts for n in given):
            raise no_typing(node)
        self.inside.add(node)
        return found[0]


def _as_they_are(site: Site, option: Option, given: Mapping[fx.Node, Placement]) -> bool:
    pairs = zip(site.inputs, option.args, strict=True)
    return all(t == given[n] if n in given else t.kind in "IR" for n, t in pairs)
