"""open_experts(program, experts, mesh): inserts the exchange of rows if experts have axes of their own.

A layer that cannot be distributed is refused here, before any decision: none is skipped silently. Without such axes
nothing has to move: experts in a loop that would compute every token are opened all the same, so that each computes the
rows that chose it. A loop that is not understood does not change.

Products with stacks of experts, of rows that the model sorted or slots that it filled, are opened here:

    rows = tokens[order // k]  →  products with stacks [E, …]  →  times probs, back in order, summed
    slots[E, C, d]             →  products with stacks [E, …]  →  back to their tokens, weighted, summed

The exchange stands before and after the calls that depend on the expert (passes/moe/exchange.py). All else stays the
user's own: sorting, filling slots, dropping, weighting, summing. A graph is opened only if its calls are shown to act
row by row, and by the rows' own experts; or to treat experts and slots as batch dims.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from passes.errors import PlanError
from passes.moe import exchange, opening
from passes.moe.domain import ROWS, STACK, Domain, domain_of
from passes.moe.layers import Dispatch, Doubt, ExpertLayer, Experts, check_draws
from passes.moe.opening_branches import BranchOpening, SlotBranchOpening
from passes.moe.opening_pairs import PairOpening
from passes.moe.ties import is_grouped, is_number, is_product, lookup
from passes.moe.tokens_once import send_tokens_once
from passes.program.builder import Builder, erase_unread
from passes.program.ops.aten import shape_of
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.walks import between
from passes.program.weights import is_weight
from passes.rules.call import operands_of
from passes.rules.follow import follow
from passes.rules.rule import RESULT
from passes.rules.table import rule_of
from passes.types.types import Sizes


def open_experts(program: Program, experts: Experts, mesh: Sizes, *, nodes: int = 1, dense: str = "") -> Experts:
    """Rewrite ``program`` at each layer of experts; returns the layers with their new calls. Raises PlanError for sizes
    that do not fit the mesh, and for layers that are not understood.

    ``nodes``: over how many nodes ep extends. ``dense``: why no value may have as many rows as the routing says, if
    experts have no axes of their own.
    """
    if not mesh.has_expert_axes:
        return _chosen_rows_alone(program, experts, dense)
    if experts.doubts:
        raise PlanError(
            f"an apparent expert layer is not recognized, so that ep cannot distribute it: {experts.doubts[0].why}",
            where=experts.doubts[0].where,
            fix="set ep: 1 and remove etp, or weight and sum the results of each expert for the tokens that chose it",
        )
    if not experts.layers:
        raise PlanError(
            f"ep = {mesh.ep}, etp = {mesh.etp}: the model has no experts with a router",
            where="mesh.ep" if mesh.ep > 1 else "mesh.etp",
            fix="set ep: 1 and remove etp",
        )
    for layer in experts.layers:
        _check_sizes(program, layer, mesh)
    layers = list(experts.layers)
    for place, layer in enumerate(layers):
        own = opening.take_own_slices(program, layer) if layer.beside else layer
        layers[place] = _opening_of(own)(program, own, layers, mesh).run()
    opened = tuple(
        send_tokens_once(program, layer, nodes) if layer.num_experts > mesh.ep > 1 or nodes > 1 else layer
        for layer in layers
    )
    program.graph_changed()
    return Experts(opened)


def _chosen_rows_alone(program: Program, experts: Experts, dense: str) -> Experts:
    """Loops over experts compute the rows that chose each, on every rank."""
    layers = list(experts.layers)
    for place, layer in enumerate(layers):
        # branches that compute tokens that did not choose them
        if layer.dispatch is Dispatch.EVERY_TOKEN and layer.tips and layer.top_k < layer.num_experts:
            layers[place] = _opened_here(program, layer, layers, dense)
    program.graph_changed()
    return Experts(tuple(layers), experts.doubts)


def _opened_here(program: Program, layer: ExpertLayer, layers: list[ExpertLayer], dense: str) -> ExpertLayer:
    if dense:
        return replace(layer, dense=Doubt(dense))
    nodes = program.graph.graph.nodes
    before = set(nodes)
    try:
        opened = BranchOpening(program, layer, layers).run()
    except PlanError as error:
        erase_unread(program.graph.graph, [node for node in nodes if node not in before])
        return replace(layer, dense=Doubt(error.what.partition(": ")[2], error.where))
    for node in nodes:
        if (domain := domain_of(node)) is not None:
            node.meta["domain"] = replace(domain, axis="tp")
    return opened


def _opening_of(layer: ExpertLayer) -> type[opening.Opening]:
    if layer.dispatch is Dispatch.OFFSETS:
        return RowOpening
    if layer.capacity:
        return SlotBranchOpening if layer.tips else SlotOpening
    return BranchOpening if layer.tips else PairOpening


def _check_sizes(program: Program, layer: ExpertLayer, mesh: Sizes) -> None:
    if layer.num_experts % mesh.ep:
        raise PlanError(
            f"{layer.num_experts} experts are not divisible by ep = {mesh.ep}",
            where="mesh.ep",
            fix=f"choose ep from {{{', '.join(map(str, _divisors(layer.num_experts)))}}}",
        )
    for weight in layer.weights:
        width = weight.shape[weight.width] if weight.width >= 0 else mesh.etp
        if width % mesh.etp:
            name = program.parameters[weight.nodes[0]]
            raise PlanError(
                f"{name} {list(weight.shape)}: the experts' width {width} is not divisible by etp = {mesh.etp}",
                where="mesh.etp",
                fix=f"choose etp from {{{', '.join(map(str, _divisors(width)[:8]))}}}; the default is tp",
            )
    if layer.capacity and mesh.cp > 1:
        raise PlanError(
            f"cp = {mesh.cp} with ep = {mesh.ep}, etp = {mesh.etp}: tokens of all ranks of cp compete for {layer.how}",
            where=where_of(program.node(layer.products[0])),
            fix="set cp: 1; or set ep: 1 and remove etp",
        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


# ---- products with stacks, of sorted rows or filled slots

OF_ROWS = "the result of one row depends on other rows"


class _RunsOpening(opening.StackOpening):
    """Owns ``inside``: calls on rows or slots; ``read``: each call that reads a value from outside, and the value."""

    HELD = ""

    def __init__(self, program: Program, layer: ExpertLayer, layers: opening.Layers, mesh: Sizes) -> None:
        super().__init__(program, layer, layers, mesh)
        self.inside = self._inside()
        known = self.inside | self.of_stacks
        self.check_read(self.stacks, known | self.apart)
        check_draws(self.inside, self.HELD, self.refusal)
        read = [(node, value) for node in sorted(self.inside) for value in node.all_input_nodes if value not in known]
        self.read = [(node, value) for node, value in read if not is_number(value)]
        for node, value in self.read:
            if is_weight(value) or not isinstance(value.meta["val"], torch.Tensor):
                raise self.refusal(node, f"experts share {value.name}, which does not belong to one expert")

    def _inside(self) -> set[fx.Node]:
        """Calls that read stacks, and calls between them; then calls that read only such values."""
        seeds = {u for n in self.of_stacks for u in n.users} - self.of_stacks - self.apart
        inside = between(seeds, seeds)
        while len(border := _border_of(inside)) > 1:
            after = {u for n in border for u in n.users if u.op == "call_function"} - inside
            joined = {u for u in after if inside.issuperset(u.all_input_nodes)}
            if not joined:
                break
            inside |= joined
        return inside


def _border_of(inside: set[fx.Node]) -> list[fx.Node]:
    """Calls inside that others read, in the graph's order."""
    return [n for n in sorted(inside) if any(u not in inside for u in n.users)]


class RowOpening(_RunsOpening):
    FIX = "compute each row with only its expert, for example with a grouped matrix product over sorted rows"
    HELD = "rows"

    def run(self) -> ExpertLayer:
        kinds = [self._kind(node, value) for node, value in self.read]
        dims = self.stack_dims()
        given = {value: 0 for (_, value), kind in zip(self.read, kinds, strict=True) if kind != "ends"}
        in_rows, last = follow(given, self.inside, self.refusal, OF_ROWS, every=True), _border_of(self.inside)
        rows = opening.Exchange(Builder(self.graph, min(self.inside), self.routing.chosen[0]), self.routing)
        self._bring(rows, kinds)
        for node in last:
            opening.read_outside(node, self.inside, rows.give_back(node, Builder(self.graph, node.next, node)))
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

    def _bring(self, rows: opening.Exchange, kinds: list[str]) -> None:
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


class SlotOpening(_RunsOpening):
    FIX = opening.SlotExchange.FIX
    HELD = "slots"

    def run(self) -> ExpertLayer:
        self.entries: dict[fx.Node, fx.Node] = {}  # the first call that reads each
        for node, value in self.read:
            self.entries.setdefault(value, node)
        exchanged = opening.SlotExchange(self)
        experts = follow(self.stacks, (self.inside | self.of_stacks) - set(self.stacks), self.refusal, opening.MIXED)
        self._check_known(experts, "has no dim of experts")
        first, kept = next(self._products())
        no_slots = "has no slots, or only some of them"
        slots = exchanged.dims([first], kept, self.inside, lambda found: self._check_known(found, no_slots))
        for value, reader in self.entries.items():
            sent = exchanged.send(value, reader, experts[value], slots[value])
            for user in [u for u in value.users if u in self.inside]:
                user.replace_input_with(value, sent)
        for node in _border_of(self.inside):
            exchanged.give_back(node, self.inside, experts[node], slots[node])
        for node in self.of_stacks | self.inside:
            node.meta["domain"] = Domain(experts=experts[node], slots=slots[node] if node in self.inside else -1)
        return exchanged.of_layer()

    def _products(self) -> Iterator[tuple[fx.Node, list[int]]]:
        """(operand, dims that are kept and the stack has not) of products with stacks."""
        for node in sorted(self.inside):
            rule, read = rule_of(node) if is_product(node) else None, operands_of(node)
            stacks = [i for i, n in enumerate(read) if n in self.of_stacks]
            for i, x in enumerate(read):
                if rule is not None and stacks and i not in stacks:
                    along = [rule.sole(i, d) for d in range(len(shape_of(x)))]
                    kept = [f is not None and f.at(RESULT) is not None and not any(map(f.at, stacks)) for f in along]
                    yield x, [d for d, is_kept in enumerate(kept) if is_kept]

    def _check_known(self, known: dict[fx.Node, int], why: str) -> None:
        for value in (*sorted(self.inside), *self.entries):
            if value not in known:
                is_lost = value not in self.entries and any(n in known for n in value.all_input_nodes)
                told = opening.MIXED if is_lost else f"{value.name} {list(shape_of(value))} {why}"
                raise self.refusal(self.entries.get(value, value), told)
