"""Notes on layers of experts, and on parts that look like one."""

from __future__ import annotations

from collections.abc import Iterator

from passes.blocks.places import Places
from passes.moe.layers import Doubt, ExpertLayer
from planner.decisions import Decisions
from planner.sharding.parameters import ParameterPlan
from planner.tables.rows import Diagnostic


def expert_notes(decisions: Decisions, parameters: tuple[ParameterPlan, ...], places: Places) -> Iterator[Diagnostic]:
    """Layers of experts, and parts that look like one."""
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
        yield Diagnostic("info", f"{what}: every rank holds {how}", where)
        if layer.dense is not None:
            yield _computed_densely(layer, layer.dense, where)
    for doubt in decisions.experts.doubts:
        yield Diagnostic(
            "info", f"this looks like a router of experts, but is not planned as one: {doubt.why}", str(doubt.where)
        )


def _computed_densely(layer: ExpertLayer, dense: Doubt, where: str) -> Diagnostic:
    """A loop over experts that computes every token, although tokens choose few experts."""
    what = (
        f"each of the {layer.num_experts} experts computes every token, {layer.num_experts / layer.top_k:g}× the work"
    )
    why, fix = dense.why, "weight and sum the results of the tokens of each expert"
    if why == "cuda_graphs":  # the key that asks for it
        why, fix = "CUDA graphs capture fixed shapes", "remove cuda_graphs, or set mesh.ep"
    return Diagnostic("info", f"{what}: {why}", str(dense.where or where), fix)
