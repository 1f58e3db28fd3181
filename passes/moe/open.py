"""open_experts(program, experts, mesh): inserts the exchange of rows if experts have axes of their own.

A layer that cannot be distributed is refused here, before any decision: none is skipped silently. Without such axes
nothing has to move: experts in a loop that would compute every token are opened all the same, so that each computes the
rows that chose it. A loop that is not understood does not change.

Each way to combine tokens and experts has its opening, which puts the exchange (passes/moe/exchange.py) around the
calls that depend on the expert. Run in one process, an opened graph computes what the captured one does.
"""

from __future__ import annotations

from dataclasses import replace

from passes.errors import PlanError
from passes.moe.domain import domain_of
from passes.moe.layers import Dispatch, Doubt, ExpertLayer, Experts
from passes.moe.opening import Opening, take_own_slices
from passes.moe.opening_branches import BranchOpening
from passes.moe.opening_pairs import PairOpening
from passes.moe.opening_rows import RowOpening
from passes.moe.opening_slots import SlotBranchOpening, SlotOpening
from passes.moe.tokens_once import send_tokens_once
from passes.program.builder import erase_unread
from passes.program.program import Program
from passes.program.source_lines import where_of
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
        own = take_own_slices(program, layer) if layer.beside else layer
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
