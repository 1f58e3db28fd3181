"""Rows of expert layers: the ranks of each expert, and the bytes of dispatch and combine."""

from collections.abc import Iterator

from passes.blocks.blocks import Places
from passes.moe import exchange
from passes.moe.layers import Doubt, ExpertLayer
from planner.decisions import Decisions
from planner.exchanges.collectives import bytes_over_ep, exchanges_of, sent_bytes
from planner.sharding.parameters import ParameterPlan
from planner.tables.tables import Diagnostic, ExpertsPlan, remark

ROWS, SLOTS = "rows", "slots"
ONCE_TO_A_RANK, ONCE_TO_A_NODE = "tokens, once to a rank", "tokens, once to a node"


def experts_rows(decisions: Decisions, places: Places) -> Iterator[ExpertsPlan]:
    """Yield one row per expert layer, in the order of the model."""
    stages, mesh, sent = decisions.stages, decisions.mesh, _sent(decisions)
    for layer in decisions.experts.layers:
        node = decisions.program.node(layer.chosen[0])
        stage = next(s for s in range(stages.num_stages) if stages.runs_on(node.name, s))
        ranks: tuple[tuple[int, ...], ...] = ()
        if mesh.has_expert_axes:
            ranks = tuple(_ranks_of(decisions, ep_rank, mesh.pp_rank_of(stage)) for ep_rank in range(mesh.ep))
        size, what = sent.get(layer.chosen, (0, ""))
        of_layer = layer.num_experts, layer.top_k, layer.how
        yield ExpertsPlan(places.block(node), *of_layer, stage, ranks, size, what if size else "")


def _ranks_of(decisions: Decisions, ep_rank: int, pp_rank: int) -> tuple[int, ...]:
    mesh = decisions.mesh
    places = (
        {"tp": etp, "ep": ep_rank, "dp": edp, "pp": pp_rank} for edp in range(mesh.edp) for etp in range(mesh.etp)
    )
    return tuple(sorted(mesh.expert.rank_of(place) for place in places))


def _sent(decisions: Decisions) -> dict[tuple[str, ...], tuple[int, str]]:
    """Return choices of a layer → (bytes that one rank sends for it, kind of payload); empty if no row is sent."""
    by_layer, mesh = dict[tuple[str, ...], tuple[int, str]](), decisions.mesh
    if not mesh.has_expert_axes or mesh.ep == mesh.etp == 1:
        return by_layer
    for node in exchanges_of(decisions):
        if node.target in (exchange.dispatch, exchange.dispatch_tokens):
            here = node.all_input_nodes[-1]
            chosen = tuple(n.name for n in here.all_input_nodes[0].all_input_nodes)
            size, what = by_layer.get(chosen, (0, ROWS))
            if node.target is exchange.dispatch_tokens:
                is_summed = any(user.target is exchange.combine for user in here.users)
                what = ONCE_TO_A_RANK if here.args[4] == 1 else ONCE_TO_A_NODE
                what += "" if is_summed else "; rows back"
            by_layer[chosen] = size + bytes_over_ep(node, mesh), what
    for layer in decisions.experts.layers:
        if layer.sent:
            by_layer[layer.chosen] = sum(sent_bytes(decisions.program.node(n), mesh) for n in layer.sent), SLOTS
    return by_layer


def expert_notes(decisions: Decisions, parameters: tuple[ParameterPlan, ...], places: Places) -> Iterator[Diagnostic]:
    mesh, cut_dim = decisions.mesh, {row.name: row.dim for row in parameters}
    names = decisions.program.parameters
    for layer in decisions.experts.layers:
        cuts = [(w, dim) for w in layer.weights if (dim := cut_dim.get(names.get(w.nodes[0], ""))) is not None]
        how = "all of them"
        if cuts:
            how = "some of them" if all(dim == w.dim for w, dim in cuts) else "a shard of each"
        if mesh.has_expert_axes:
            of_each = f", 1/{mesh.etp} of each" if cuts else ""
            how = f"{layer.num_experts // mesh.ep} of them{of_each}"
        for_a_token = f"{layer.top_k} per token" if layer.top_k else "any number per token"
        what = f"{layer.num_experts} experts, {for_a_token} ({layer.how})"
        where = places.text(decisions.program.node(layer.products[0]))
        yield remark(f"{what}: every rank holds {how}", where)
        if layer.dense is not None:
            yield _computed_densely(layer, layer.dense, where)
    for doubt in decisions.experts.doubts:
        yield Diagnostic(
            "info", f"this looks like a router of experts, but is not planned as one: {doubt.why}", str(doubt.where)
        )


def _computed_densely(layer: ExpertLayer, dense: Doubt, where: str) -> Diagnostic:
    """Return the note on a loop over experts in which each expert computes every token."""
    what = (
        f"each of the {layer.num_experts} experts computes every token, {layer.num_experts / layer.top_k:g}× the work"
    )
    why, fix = dense.why, "weight and sum the results of the tokens of each expert"
    if why == "cuda_graphs":  # the key that asks for it
        why, fix = "CUDA graphs capture fixed shapes", "remove cuda_graphs, or set mesh.ep"
    return remark(f"{what}: {why}", str(dense.where or where), fix)
