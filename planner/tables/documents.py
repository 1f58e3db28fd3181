"""Notes on attention that keeps the documents of a packed sequence apart."""

from __future__ import annotations

from collections.abc import Iterator

from passes.blocks.places import Places
from passes.program.ops.aten import shape_of
from planner.decisions import Decisions
from planner.placement.attention.sites import AttentionSite
from planner.spec.spec import Spec
from planner.tables.rows import Diagnostic


def documents_notes(
    spec: Spec, decisions: Decisions, sites: tuple[AttentionSite, ...], places: Places
) -> Iterator[Diagnostic]:
    """Which attentions compute the pairs of tokens within documents alone, and which all pairs of a sequence."""
    documents, program = decisions.documents, decisions.program
    if spec.data.packing != "documents":
        return
    within = [n for n in program.graph.graph.nodes if n.name in documents.attentions]
    if within:
        length = shape_of(within[0])[2] * decisions.mesh.cp
        share = f"{documents.mean / length:.0%} of the pairs of a sequence of {length}"
        how = f"for documents of {documents.mean} tokens" if documents.mean < length else "unless documents are shorter"
        fix = "" if documents.mean < length else "set data.mean_document for the predicted memory and time"
        what = f"{len(within)} attentions run within documents: {share}, {how}"
        yield Diagnostic("info", what, places.text(within[0]), fix)
    others = [site.node for site in sites if not any(n.name in documents.attentions for n in site.nodes)]
    if others:
        why = "" if spec.cuda_graphs.impl == "none" else ", as CUDA graphs hold the blocks of no document"
        what = (
            f"{len(others)} kinds of attention compute all pairs of a sequence and mask those of other documents{why}"
        )
        fix = "" if why else "use torch.nn.functional.scaled_dot_product_attention with a mask and without dropout"
        yield Diagnostic("info", what, places.text(others[0]), fix)
