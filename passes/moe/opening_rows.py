"""Opens a captured graph at products of rows sorted by expert with stacks of experts: inserts the exchange there.

    rows = tokens[order // k]  →  products with stacks [E, …]  →  times probs, back in order, summed

becomes ``dispatch`` before and ``give_back`` after the calls that depend on the expert (passes/moe/exchange.py).
All before and after it stays the user's own: sorting, weighting, summing. A graph is opened only if its calls are shown
to act row by row, and by the rows' own experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from passes.moe import exchange
from passes.moe.domain import ROWS, STACK, Builder, Domain, erase_unread
from passes.moe.inside import border_of, check_read, inside_of, made_of, outer_of, stacks_of
from passes.moe.layers import ExpertLayer, check_draws
from passes.moe.opening import Exchange, Opening, read_outside
from passes.moe.rows import OF_ROWS, OF_STACKS, dims_of
from passes.moe.ties import is_grouped, lookup
from passes.program.ops.aten import shape_of
from passes.program.weights import is_weight


class RowOpening(Opening):
    """Owns the domain: ``stacks`` and values made of them alone, ``inside`` calls on rows; ``read``: each call that
    reads a value from outside, the value, and its kind."""

    FIX = "compute each row with only its expert, for example with a grouped matrix product over sorted rows"

    def run(self) -> ExpertLayer:
        self.stacks = stacks_of(self.program, self.layer)
        self.of_stacks = made_of(self.stacks)
        self.inside = inside_of(self.of_stacks, self.apart)
        check_read(self.stacks, self.inside | self.of_stacks | self.apart, self.refusal)
        check_draws(self.inside, "rows", self.refusal)
        self.read = list(self._read())
        domains, last = self._domains(), border_of(self.inside)
        rows = Exchange(Builder(self.graph, min(self.inside), self.routing.chosen[0]), self.routing)
        self._bring(rows)
        for node in last:
            read_outside(node, self.inside, rows.give_back(node, Builder(self.graph, node.next, node)))
        for node, domain in domains.items():
            node.meta["domain"] = domain
        return self.layer

    # ---- what is read from outside

    def _read(self) -> Iterator[tuple[fx.Node, fx.Node, str]]:
        for node in sorted(self.inside):
            for value in outer_of(node, self.inside | self.of_stacks):
                yield node, value, self._kind(node, value)

    def _kind(self, node: fx.Node, value: fx.Node) -> str:
        """ "ends" of each expert's rows, "ids" of the expert of each row, or "rows"."""
        if is_weight(value) or not isinstance(value.meta["val"], torch.Tensor):
            raise self.refusal(node, f"experts share {value.name}, which does not belong to one expert")
        if is_grouped(node) and node.all_input_nodes[2] is value:
            if not self.routing.are_ends(value):
                raise self.refusal(node, "its row counts do not come from the choices of the router")
            return "ends"
        found, shape = lookup(node), shape_of(value)
        if found is not None and found[2] is value:
            if not self.routing.are_ids(value):
                raise self.refusal(node, "its rows are not sorted by expert")
            return "ids"
        if shape[:1] != (self.routing.num_rows,) or not value.meta["val"].dtype.is_floating_point:
            raise self.refusal(node, f"{value.name} {list(shape)} has neither a dim of rows nor one of experts")
        return "rows"

    def _domains(self) -> dict[fx.Node, Domain]:
        """Which dims of each value count experts and rows. Raises PlanError if rows are mixed."""
        dims = dims_of(self.stacks, self.of_stacks - set(self.stacks), self.refusal, OF_STACKS)
        given = {value: 0 for _, value, kind in self.read if kind != "ends"}
        rows = dims_of(given, self.inside, self.refusal, OF_ROWS)
        return {n: Domain(experts=dim) for n, dim in dims.items()} | {n: Domain(rows=rows[n]) for n in self.inside}

    # ---- the rewrite

    def _bring(self, rows: Exchange) -> None:
        brought: dict[tuple[fx.Node, str], fx.Node] = {}
        for node, value, kind in self.read:
            if (value, kind) not in brought:
                build, val = Builder(self.graph, node, value), value.meta["val"]
                if kind == "ends":
                    made = build.call(exchange.ends_of, rows.here, val.dtype, val=val, domain=STACK)
                elif kind == "ids":
                    made = build.call(exchange.ids_of, rows.here, self.routing.num_rows, val=val, domain=ROWS)
                else:
                    made = rows.dispatch(value, build)
                brought[value, kind] = made
            node.replace_input_with(value, brought[value, kind])
        erase_unread(self.graph, {value for value, _ in brought})
