"""The opening of a layer of experts: its choices and errors, and the calls of the exchange that all openings make.

    here  = meet(count_experts(chosen))                   the rows of each expert that come to this rank
    order = argsort(chosen)    token = order // k         the pairs of token and choice, by expert
    rows  = x[token], w[order], gate[token, expert]       → dispatch → experts → give_back → in the order of the pairs

A model that sorts its rows itself needs ``meet``, ``dispatch`` and ``give_back`` alone.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from functools import cached_property
from operator import getitem

import torch
from torch import fx

from passes.moe import exchange
from passes.moe.domain import ROWS, STACK, Builder
from passes.moe.layers import ExpertLayer, refusal_of
from passes.moe.routing import Routing
from passes.program.ops.aten import aten, shape_of
from passes.program.program import Program


class Opening:
    """Puts the exchange around the calls of ``layer`` that depend on the expert. ``run`` returns the layer with the
    calls of now; it raises PlanError if the layer is not understood.

    ``apart``: calls of other layers with the same weights.
    """

    FIX = ""  # what to write instead

    def __init__(self, program: Program, layer: ExpertLayer, apart: Set[fx.Node]) -> None:
        self.program, self.graph, self.layer, self.apart = program, program.graph.graph, layer, apart
        self.routing = Routing(layer.num_experts, [program.node(name) for name in layer.chosen])
        self.refusal = refusal_of(layer, self.FIX)

    def run(self) -> ExpertLayer:
        raise NotImplementedError

    def check_distinct(self) -> None:
        if not self.routing.are_distinct:
            raise self.refusal(self.routing.chosen[0], "its choices are not the result of one topk")


def read_outside(node: fx.Node, inside: Collection[fx.Node], back: fx.Node) -> None:
    """All readers of ``node`` that are not ``inside`` read ``back``."""
    for user in [u for u in node.users if u not in inside and u is not back]:
        user.replace_input_with(node, back)


class Exchange:
    """Of the rows of one layer. Owns its calls, each of which is made when it is first asked for.

    ``build``: where they are made. ``top_k``: how many rows in turn are of one token, if not one for each choice.
    """

    def __init__(self, build: Builder, routing: Routing, top_k: int = 0) -> None:
        self.build, self.routing, self.top_k = build, routing, top_k or routing.top_k

    @cached_property
    def counts(self) -> fx.Node:
        """Of the rows of each expert."""
        val = torch.empty(self.routing.size, dtype=torch.int64, device="meta")
        return self.build.call(exchange.count_experts, self.routing.size, *self.routing.chosen, val=val)

    @cached_property
    def here(self) -> fx.Node:
        """The rows of each expert that come to this rank, by an exchange of counts."""
        val = self.counts.meta["val"]
        return self.build.call(exchange.meet, self.counts, self.routing.num_rows, val=val, domain=STACK)

    @cached_property
    def _flat(self) -> fx.Node:
        return self.build.call(aten.reshape.default, self.routing.chosen[0], [self.routing.num_rows])

    @cached_property
    def order(self) -> fx.Node:
        """The pairs of token and choice, by expert."""
        return self._sorted(self._flat)

    @cached_property
    def token(self) -> fx.Node:
        """That of each row."""
        return self.build.call(aten.floor_divide.default, self.order, self.top_k)

    @cached_property
    def expert(self) -> fx.Node:
        """That of each row."""
        return self.build.call(aten.index.Tensor, self._flat, [self.order])

    @cached_property
    def places(self) -> fx.Node:
        """That of each pair among the rows."""
        return self._sorted(self.order)

    def _sorted(self, values: fx.Node) -> fx.Node:
        return self.build.call(getitem, self.build.call(aten.sort.stable, values, stable=True), 1)

    def dispatch(self, rows: fx.Node, build: Builder | None = None) -> fx.Node:
        """Rows by expert, on the ranks of their experts."""
        call = (build or self.build).call
        return call(exchange.dispatch, rows, self.here, domain=ROWS, val=rows.meta["val"])

    def bring(self, value: fx.Node, shape: list[int], *index: fx.Node) -> fx.Node:
        """The rows of a value, seen in this shape, on the ranks of their experts; ``index``: of its first dims."""
        return self.taken(self.build.call(aten.reshape.default, value, shape), *index)

    def taken(self, value: fx.Node, *index: fx.Node) -> fx.Node:
        """The same of a value with these first dims."""
        return self.dispatch(self.build.call(aten.index.Tensor, value, list(index)))

    def give_back(self, rows: fx.Node, build: Builder | None = None) -> fx.Node:
        """The results of the rows, at their own places."""
        return (build or self.build).call(exchange.give_back, rows, self.here, val=rows.meta["val"])

    def returned(self, rows: fx.Node, *, summed: bool) -> fx.Node:
        """The results given back: of each pair, or ``summed`` over the choices of each token."""
        pairs = self.build.call(aten.index.Tensor, self.give_back(rows), [self.places])
        if not summed:
            return pairs
        shape = [self.routing.num_rows // self.top_k, self.top_k, *shape_of(rows)[1:]]
        return self.build.call(aten.sum.dim_IntList, self.build.call(aten.reshape.default, pairs, shape), [1])
