"""open_experts(program, experts, mesh): inserts the exchange of rows if experts have axes of their own.

A layer that cannot be distributed is refused here, before any decision: none is skipped silently. Without such axes
nothing has to move: experts that would compute every token are opened all the same, so that each computes the rows that
chose it: in a loop, and in stacks of at least ``FEW`` times as many as a token chooses. What is not understood does not
change.

Each way to combine tokens and experts has its opening, which puts the exchange (passes/moe/exchange.py) around the
calls that depend on the expert. Run in one process, an opened graph computes what the captured one does.
"""

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from passes.errors import PlanError
from passes.moe import exchange
from passes.moe.domain import ROWS, STACK, Domain, domain_of
from passes.moe.layers import Dispatch, Doubt, ExpertLayer, Experts
from passes.moe.opening import Exchange, Opening, RunsOpening, take_own_slices
from passes.moe.opening_branches import BranchOpening
from passes.moe.opening_pairs import PairOpening
from passes.moe.opening_slots import SlotBranchOpening, SlotOpening
from passes.moe.paths import most_alike
from passes.moe.ties import is_grouped, lookup
from passes.moe.tokens_once import send_tokens_once
from passes.program.builder import Builder, erase_unread
from passes.program.ops.aten import shape_of
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.rules.follow import follow
from passes.types.types import Sizes

FEW = 4  # of fewer, one product of all stacks and tokens takes about the time of sorting rows


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
        raise _no_router(program, mesh)
    for layer in experts.layers:
        _check_sizes(program, layer, mesh)
    layers = list(experts.layers)
    for place, layer in enumerate(layers):
        layers[place] = to_rows(program, layer, layers, mesh.ep)
    opened = tuple(
        send_tokens_once(program, layer, nodes) if layer.num_experts > mesh.ep > 1 or nodes > 1 else layer
        for layer in layers
    )
    return Experts(opened)


def _no_router(program: Program, mesh: Sizes) -> PlanError:
    what, fix = f"ep = {mesh.ep}, etp = {mesh.etp}: the model has no experts with a router", "set ep: 1 and remove etp"
    alike = most_alike(program.graph.graph)
    if len(alike) < 4:  # query, key and value are three
        return PlanError(what, where="mesh.ep" if mesh.ep > 1 else "mesh.etp", fix=fix)
    why = f"no topk, sort, max or argmax of {len(alike)} scores gives the indices that choose among these products"
    fix = f"choose by the indices of one topk of {len(alike)} scores; or {fix}"
    return PlanError(f"{what}: {why}", where=where_of(alike[0].node), fix=fix)


def to_rows(program: Program, layer: ExpertLayer, layers: Iterable[ExpertLayer] = (), ep: int = 0) -> ExpertLayer:
    """Rewrite ``program`` so that the experts of ``layer``, one of its ``layers``, compute rows grouped by expert, or
    their slots; returns the layer with its calls of now. Raises PlanError, with the program in part rewritten, if it is
    not understood. In one process nothing is exchanged, and the values are those of before.

    ``ep``: each of so many ranks has the branches of its own experts alone; 0: rows stay on their rank.
    """
    own = take_own_slices(program, layer) if layer.beside and ep else layer
    return _opening_of(own)(program, own, layers, ep).run()


def _chosen_rows_alone(program: Program, experts: Experts, dense: str) -> Experts:
    """Rewrite experts that compute tokens which did not choose them to compute the rows that did, on every rank."""
    layers = list(experts.layers)
    for place, layer in enumerate(layers):
        most = layer.num_experts - 1 if layer.tips else layer.num_experts // FEW
        if layer.dispatch is Dispatch.EVERY_TOKEN and layer.top_k <= most:
            layers[place] = _opened_here(program, layer, layers, dense)
    return Experts(tuple(layers), experts.doubts)


def _opened_here(program: Program, layer: ExpertLayer, layers: list[ExpertLayer], dense: str) -> ExpertLayer:
    if dense:
        return replace(layer, dense=Doubt(dense))
    nodes = program.graph.graph.nodes
    before = set(nodes)
    try:
        opened = to_rows(program, layer, layers)
    except PlanError as error:
        erase_unread(program.graph.graph, [node for node in nodes if node not in before])
        return replace(layer, dense=Doubt(error.what.partition(": ")[2], error.where))
    for node in nodes:
        if (domain := domain_of(node)) is not None:
            node.meta["domain"] = replace(domain, axis="tp")
    return opened


def _opening_of(layer: ExpertLayer) -> type[Opening]:
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


# ---- rows that the model sorted

OF_ROWS = "the result of one row depends on other rows"


class RowOpening(RunsOpening):
    """The opening of a captured graph at products with stacks, of rows that the model sorted by expert.

        rows = tokens[order // k]  →  products with stacks [E, …]  →  times probs, back in order, summed

    Sorting, weighting and summing stay the user's own. A graph is opened only if its calls are shown to act row by row,
    and by the rows' own experts.
    """

    FIX = "compute each row with only its expert, for example with a grouped matrix product over sorted rows"
    HELD = "rows"

    def run(self) -> ExpertLayer:
        kinds, dims = {value: self._kind(node, value) for node, value in self.read}, self.stack_dims()
        given = {value: 0 for value, kind in kinds.items() if kind != "ends"}
        in_rows = follow(given, self.inside, self.refusal, OF_ROWS, every=True)
        rows = Exchange(Builder(self.graph, min(self.inside), self.routing.chosen[0]), self.routing)
        self.enter(lambda value, build: self._brought(rows, value, kinds[value], build))
        erase_unread(self.graph, kinds)
        self.leave(rows.give_back)
        self.mark(dims, lambda node: Domain(rows=in_rows[node]))
        return self.layer

    def _kind(self, node: fx.Node, value: fx.Node) -> str:
        """Return "ends" of each expert's rows, "ids" of the expert of each row, or "rows"."""
        if is_grouped(node) and node.all_input_nodes[2] is value:
            if self.routing.name_of(value) != "ends":
                raise self.refusal(node, "its row counts do not come from the choices of the router")
            return "ends"
        found, shape = lookup(node), shape_of(value)
        if found is not None and found[2] is value:
            if self.routing.name_of(value) != "expert":
                raise self.refusal(node, "its rows are not sorted by expert")
            return "ids"
        if shape[:1] != (self.routing.num_rows,) or not value.meta["val"].dtype.is_floating_point:
            raise self.refusal(node, f"{value.name} {list(shape)} has neither a dim of rows nor one of experts")
        return "rows"

    def _brought(self, rows: Exchange, value: fx.Node, kind: str, build: Builder) -> fx.Node:
        if kind == "ends":
            return build.call(exchange.ends_of, rows.here, value.meta["val"].dtype, domain=STACK)
        if kind == "ids":
            return build.call(exchange.ids_of, rows.here, self.routing.num_rows, domain=ROWS)
        return rows.dispatch(value, build)
