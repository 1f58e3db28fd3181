"""Opens a captured graph at products of rows sorted by expert with stacks of experts: inserts the exchange there.

    rows = tokens[order // k]  →  products with stacks [E, …]  →  times probs, back in order, summed

becomes ``dispatch`` before and ``give_back`` after the calls that depend on the expert (passes/moe/exchange.py).
All before and after it stays the user's own: sorting, weighting, summing. A graph is opened only if its calls are shown
to act row by row, and by the rows' own experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import torch
from torch import fx

from passes.moe import exchange
from passes.moe.building import Builder, erase_unread
from passes.moe.domain import Domain
from passes.moe.inside import border_of, check_read, inside_of, made_of, outer_of
from passes.moe.layers import ExpertLayer
from passes.moe.own_slices import stacks_of
from passes.moe.refusals import check_draws, refusal_of
from passes.moe.routing import Routing
from passes.moe.rows import Rows, dims_of_stacks, keeps_rows
from passes.moe.ties import is_grouped, lookup
from passes.program.ops.aten import shape_of
from passes.program.program import Program
from passes.program.weights import is_weight

FIX = "compute each row with only its expert, for example with a grouped matrix product over sorted rows"


def open_stacks(program: Program, layer: ExpertLayer, apart: Set[fx.Node]) -> None:
    """Put the exchange around the calls of ``layer`` that depend on the expert. Raises PlanError if they are not
    understood.

    ``apart``: calls of other layers with the same stacks.
    """
    _Opening(program, layer, apart).run()


class _Opening:
    """Owns the domain: ``stacks`` and values made of them alone, ``inside`` calls on rows."""

    def __init__(self, program: Program, layer: ExpertLayer, apart: Set[fx.Node]) -> None:
        self.apart = apart
        self.graph, self.layer = program.graph.graph, layer
        self.routing = Routing(layer.num_experts, [program.node(name) for name in layer.chosen])
        self.stacks = stacks_of(program, layer)
        self.of_stacks = made_of(self.stacks)
        self.inside = inside_of(self.of_stacks, apart)
        self._refusal = refusal_of(layer, FIX)

    def run(self) -> None:
        self._check()
        domains = self._domains()
        last = border_of(self.inside)
        first = min(self.inside)
        here = self._meet(first)
        self._bring_rows(here)
        self._give_back(here, last)
        for node, domain in domains.items():
            node.meta["domain"] = domain

    # ---- the inside

    def _outer(self, node: fx.Node) -> list[fx.Node]:
        return outer_of(node, self.inside | self.of_stacks)

    def _is_rows(self, value: fx.Node) -> bool:
        shape = shape_of(value)
        return bool(shape) and shape[0] == self.routing.num_rows and value.meta["val"].dtype.is_floating_point

    # ---- checks

    def _check(self) -> None:
        check_read(self.stacks, self.inside | self.of_stacks | self.apart, self._refusal)
        check_draws(self.inside, "rows", self._refusal)
        for node in sorted(self.inside):
            for value in self._outer(node):
                self._check_read(node, value)

    def _check_read(self, node: fx.Node, value: fx.Node) -> None:
        if is_weight(value) or not isinstance(value.meta["val"], torch.Tensor):
            raise self._refusal(node, f"experts share {value.name}, which does not belong to one expert")
        if self._is_ends(node, value):
            if not self.routing.are_ends(value):
                raise self._refusal(node, "its row counts do not come from the choices of the router")
        elif self._is_ids(node, value):
            if not self.routing.are_ids(value):
                raise self._refusal(node, "its rows are not sorted by expert")
        elif not self._is_rows(value):
            raise self._refusal(
                node, f"{value.name} {list(shape_of(value))} has neither a dim of rows nor one of experts"
            )

    @staticmethod
    def _is_ends(node: fx.Node, value: fx.Node) -> bool:
        return is_grouped(node) and node.all_input_nodes[2] is value

    @staticmethod
    def _is_ids(node: fx.Node, value: fx.Node) -> bool:
        found = lookup(node)
        return found is not None and found[2] is value

    def _domains(self) -> dict[fx.Node, Domain]:
        """Which dims of each value count experts and rows. Raises PlanError if rows are mixed."""
        dims = dims_of_stacks(self.stacks, self.of_stacks, self.layer.num_experts, self._refusal)
        found = {n: Domain(experts=dim) for n, dim in dims.items()}
        rows = Rows(self.routing.num_rows)
        for node in sorted(self.inside):
            for value in self._outer(node):
                if self._is_rows(value) or self._is_ids(node, value):
                    rows.known.setdefault(value, 0)
            dim = rows.follow(node)
            if dim is None or not keeps_rows(node, rows.known):
                raise self._refusal(node, "the result of one row depends on other rows")
            found[node] = Domain(rows=dim)
        return found

    # ---- the rewrite

    def _meet(self, first: fx.Node) -> fx.Node:
        return self.routing.meet(Builder(self.graph, first, self.routing.chosen[0]))

    def _bring_rows(self, here: fx.Node) -> None:
        brought: dict[tuple[fx.Node, str], fx.Node] = {}
        for node in sorted(self.inside):
            for value in self._outer(node):
                kind = "ends" if self._is_ends(node, value) else "ids" if self._is_ids(node, value) else "rows"
                if (value, kind) not in brought:
                    brought[value, kind] = self._brought(node, value, kind, here)
                node.replace_input_with(value, brought[value, kind])
        erase_unread(self.graph, {value for value, _ in brought})

    def _brought(self, before: fx.Node, value: fx.Node, kind: str, here: fx.Node) -> fx.Node:
        build, val = Builder(self.graph, before, value), value.meta["val"]
        if kind == "ends":
            return build.call(exchange.ends_of, here, val.dtype, val=val, domain=Domain(experts=0))
        if kind == "ids":
            return build.call(exchange.ids_of, here, self.routing.num_rows, val=val, domain=Domain(rows=0))
        return build.call(exchange.dispatch, value, here, val=val, domain=Domain(rows=0))

    def _give_back(self, here: fx.Node, last: Iterable[fx.Node]) -> None:
        for node in last:
            users = [u for u in node.users if u not in self.inside]
            back = Builder(self.graph, node.next, node).call(exchange.give_back, node, here, val=node.meta["val"])
            for user in users:
                user.replace_input_with(node, back)
