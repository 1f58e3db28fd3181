"""Tokens go once to each rank of their experts, not once for each expert, and come back summed.

    dispatch(x[token], here)                          →   dispatch_tokens(x, token, here)
    w · give_back(rows, here), in the order of
    the pairs, summed over a token's choices          →   combine(rows · dispatch(w, here), token, here, t)

Weights that are wider than the rows make products and sums so wide; the sums travel in the rows' dtype. A layer that
sums otherwise returns row by row; one with values that are no copies of tokens sends row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from passes.moe import exchange
from passes.moe.building import Builder, erase_unread
from passes.moe.domain import Domain
from passes.moe.layers import ExpertLayer
from passes.moe.routing import Routing
from passes.moe.row_sums import RowSum, only_index, sum_of
from passes.program.ops.aten import aten, shape_of, without_reshapes
from passes.program.program import Program

ROWS = Domain(rows=0)


def send_tokens_once(program: Program, layer: ExpertLayer, nodes: int) -> ExpertLayer:
    """Rewrite an opened ``layer`` if a token has several experts; ep spans ``nodes``. Returns it with the new calls."""
    for here in program.graph.graph.find_nodes(op="call_function", target=exchange.meet):
        if tuple(n.name for n in here.args[0].all_input_nodes) == layer.chosen and len(here.args) == 2:
            return _Layer(program, layer, here, nodes).rewritten()
    return layer


@dataclass(frozen=True)
class _Copy:
    """Of a dispatch: row i is a copy of token ``index``[i] // ``times``."""

    tokens: fx.Node
    index: fx.Node
    times: int = 1


class _Layer:
    """Owns ``copies``: the dispatches of copies of tokens."""

    def __init__(self, program: Program, layer: ExpertLayer, here: fx.Node, nodes: int) -> None:
        self.graph, self.layer, self.here, self.nodes = program.graph.graph, layer, here, nodes
        self.routing = Routing(layer.num_experts, [program.node(name) for name in layer.chosen])
        self.num_tokens = self.routing.num_rows // self.routing.top_k
        self.copies = {node: found for node in here.users if (found := self._copy(node)) is not None}

    def _copy(self, node: fx.Node) -> _Copy | None:
        rows: Any = node.args[0] if node.target is exchange.dispatch else None
        if rows is None or rows.target is not aten.index.Tensor or not shape_of(rows)[1:]:
            return None
        index, source = only_index(rows), rows.args[0]
        if index is None or shape_of(source)[0] == self.num_tokens:
            return index and _Copy(source, index)
        tokens = _repeated(source, self.num_tokens, self.routing.top_k)
        return tokens and _Copy(tokens, index, self.routing.top_k)

    def rewritten(self) -> ExpertLayer:
        places = {(copy.index, copy.times) for copy in self.copies.values()}
        first = min(self.here.users)
        if self.routing.top_k == 1 or len(places) != 1 or not max(places)[0] < first:
            return self.layer
        ((token, times),) = places
        build = Builder(self.graph, first, self.here)
        token = token if times == 1 else build.call(aten.floor_divide.default, token, times)
        given = (*self.here.args, token, self.num_tokens, self.nodes)
        here = build.call(exchange.meet, *given, val=self.here.meta["val"], domain=self.here.meta["domain"])
        self.here.replace_all_uses_with(here)
        self.graph.erase_node(self.here)
        for node, copy in self.copies.items():
            at, val = Builder(self.graph, node, node), node.meta["val"]
            value = at.call(aten.reshape.default, copy.tokens, [self.num_tokens, *shape_of(node)[1:]])
            node.replace_all_uses_with(at.call(exchange.dispatch_tokens, value, token, here, val=val, domain=ROWS))
            erase_unread(self.graph, [node])
        backs = [node for node in here.users if node.target is exchange.give_back]
        found = sum_of(backs[0], self.routing) if len(backs) == 1 else None
        return (
            self.layer
            if found is None or not found.is_by(token, self.routing)
            else self._summed(found, backs[0], token)
        )

    def _summed(self, found: RowSum, back: fx.Node, token: fx.Node) -> ExpertLayer:
        """The results of experts, weighted there, summed by token."""
        rows: Any
        rows, here = back.args
        end, size, dtype = found.end, self.num_tokens, rows.meta["val"].dtype
        build = Builder(self.graph, end, end)
        for weight in self._weights(build, found):
            sent = build.call(exchange.dispatch, weight, here, val=weight.meta["val"], domain=ROWS)
            shape = [self.routing.num_rows, *(1 for _ in shape_of(rows)[1:])]
            sent = build.call(aten.reshape.default, sent, shape, domain=ROWS)
            rows = build.call(aten.mul.Tensor, rows, sent, domain=ROWS)
        val = torch.empty(size, *shape_of(rows)[1:], dtype=dtype, device="meta")
        whole = build.call(exchange.combine, rows, token, here, size, dtype, val=val)
        whole = build.call(aten.reshape.default, whole, list(shape_of(end)))
        if end.meta["val"].dtype != dtype:
            whole = build.call(aten.to.dtype, whole, end.meta["val"].dtype)
        whole = whole if found.base is None else build.call(aten.add.Tensor, found.base, whole)
        end.replace_all_uses_with(whole)
        erase_unread(self.graph, [end])
        return replace(self.layer, combined=whole.name) if end.name == self.layer.combined else self.layer

    def _weights(self, build: Builder, found: RowSum) -> Iterator[fx.Node]:
        """Each [n], in the order of the rows."""
        for weight in found.by_row:
            yield build.call(aten.reshape.default, weight, [self.routing.num_rows])
        for weight in found.by_pair:
            pairs = build.call(aten.reshape.default, weight, [self.routing.num_rows])
            order = build.call(getitem, build.call(aten.sort.stable, found.inverse, stable=True), 1)
            yield build.call(aten.index.Tensor, pairs, [order])


def _repeated(value: fx.Node, num_tokens: int, times: int) -> fx.Node | None:
    """The tokens that ``value`` [num_tokens · times, …] repeats, each as often."""
    node = without_reshapes(value)
    if node.target is not aten.expand.default:
        return None
    tokens: Any = node.args[0]
    before, after = shape_of(tokens), shape_of(node)
    dims = [d for d in range(len(after)) if before[d] != after[d]]
    if len(dims) != 1 or after[dims[0]] != times or prod(after[: dims[0]]) != num_tokens:
        return None
    return tokens if prod(after[dims[0] + 1 :]) == prod(shape_of(value)[1:]) else None
