"""The dim of rows of each value, followed through calls that act on each row alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import getitem

from torch import fx

from planner.experts.ids import VIEWS
from planner.experts.space import Ties
from planner.experts.ties import is_grouped, lookup
from planner.graph.ops.aten import aten, is_pointwise, named, ops_named, packet_of, reduced_dims, shape_of
from planner.graph.ops.products import PRODUCTS

ALONG = set(ops_named("softmax.int _softmax log_softmax.int _log_softmax sum.dim_IntList mean.dim amax amin"))
ALONG |= set(ops_named("cumsum logsumexp any.dim argmax argmin topk sort"))
NORMS = {aten.layer_norm, aten.rms_norm}
PARTING = {aten.slice, aten.select, aten.split_with_sizes, aten.split, aten.unbind, aten.cat}


@dataclass
class Rows:
    """``known``: value → the dim of ``size`` that counts the rows."""

    size: int
    known: dict[fx.Node, int] = field(default_factory=dict)
    ties: Ties = field(default_factory=Ties)

    def follow(self, node: fx.Node) -> int | None:
        """The dim of a call's rows, if all that it reads of them agrees; None if it has none."""
        found: set[int] = set()
        for value in node.all_input_nodes:
            if value in self.known:
                found |= self._through(node, value)
        if len(found) != 1:
            return None
        self.known[node] = found.pop()
        return self.known[node]

    def _through(self, node: fx.Node, value: fx.Node) -> set[int]:
        if node.target is getitem:
            return {self.known[value]} if len(shape_of(node)) == len(shape_of(value)) else set()
        if packet_of(node.target) in (aten.split_with_sizes, aten.split):
            return {self.known[value]}
        places = self.ties.through(node, value, (self.known[value], 1), self.size)
        return {place[0] for n, place in places if n is node and place[1] == 1}


def keeps_rows(node: fx.Node, rows: Mapping[fx.Node, int]) -> bool:
    """Whether each row that a call makes is made of that row alone."""
    packet = packet_of(node.target)
    if node.target is getitem or is_pointwise(node.target) or packet in VIEWS or is_grouped(node):
        return True
    if node.target in PRODUCTS or lookup(node) is not None:
        return True  # ties keep the label of a dim that a product keeps
    dims = {rows[n] for n in node.all_input_nodes if n in rows}
    if node.target in ALONG:
        return not dims & reduced_dims(node)
    if packet in NORMS:
        ndim = len(shape_of(node))
        return all(d < ndim - len(named(node)["normalized_shape"]) for d in dims)
    if packet in PARTING:
        first = node.all_input_nodes[0]
        return int(named(node).get("dim") or 0) % len(shape_of(first)) not in dims
    return False
