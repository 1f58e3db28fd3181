"""Opens a captured graph at products with stacks, of rows that the model sorted by expert.

    rows = tokens[order // k]  →  products with stacks [E, …]  →  times probs, back in order, summed

Sorting, weighting and summing stay the user's own. A graph is opened only if its calls are shown to act row by row, and
by the rows' own experts.
"""

from __future__ import annotations

from torch import fx

from passes.moe import exchange
from passes.moe.domain import ROWS, STACK, Domain
from passes.moe.layers import ExpertLayer
from passes.moe.opening import Exchange, RunsOpening, border_of, read_outside
from passes.moe.ties import is_grouped, lookup
from passes.program.builder import Builder, erase_unread
from passes.program.ops.aten import shape_of
from passes.rules.follow import follow

OF_ROWS = "the result of one row depends on other rows"


class RowOpening(RunsOpening):
    FIX = "compute each row with only its expert, for example with a grouped matrix product over sorted rows"
    HELD = "rows"

    def run(self) -> ExpertLayer:
        kinds = [self._kind(node, value) for node, value in self.read]
        dims = self.stack_dims()
        given = {value: 0 for (_, value), kind in zip(self.read, kinds, strict=True) if kind != "ends"}
        in_rows, last = follow(given, self.inside, self.refusal, OF_ROWS, every=True), border_of(self.inside)
        rows = Exchange(Builder(self.graph, min(self.inside), self.routing.chosen[0]), self.routing)
        self._bring(rows, kinds)
        for node in last:
            read_outside(node, self.inside, rows.give_back(node, Builder(self.graph, node.next, node)))
        for node in self.of_stacks | self.inside:
            node.meta["domain"] = Domain(rows=in_rows[node]) if node in self.inside else Domain(experts=dims[node])
        return self.layer

    def _kind(self, node: fx.Node, value: fx.Node) -> str:
        """ "ends" of each expert's rows, "ids" of the expert of each row, or "rows"."""
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

    def _bring(self, rows: Exchange, kinds: list[str]) -> None:
        brought: dict[tuple[fx.Node, str], fx.Node] = {}
        for (node, value), kind in zip(self.read, kinds, strict=True):
            if (value, kind) not in brought:
                build = Builder(self.graph, node, value)
                if kind == "ends":
                    made = build.call(exchange.ends_of, rows.here, value.meta["val"].dtype, domain=STACK)
                elif kind == "ids":
                    made = build.call(exchange.ids_of, rows.here, self.routing.num_rows, domain=ROWS)
                else:
                    made = rows.dispatch(value, build)
                brought[value, kind] = made
            node.replace_input_with(value, brought[value, kind])
        erase_unread(self.graph, {value for value, _ in brought})
