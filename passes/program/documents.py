"""Which attentions keep the documents of a packed sequence apart, by a mask made of an input that names them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from passes.program.ops.aten import aten, is_random, named, shape_of
from passes.program.program import Program
from passes.program.walks import readers, walk


@dataclass(frozen=True, slots=True)
class Documents:
    """``attentions``: by name. ``mean``: tokens of a document, on average."""

    attentions: frozenset[str] = frozenset()
    mean: int = 0


NO_DOCUMENTS = Documents()


def find_documents(program: Program, inputs: Collection[str], mean: int | None) -> Documents:
    """Attentions without dropout, with a mask made of one of ``inputs`` (keys of the batch), by no weight.

    ``mean``: None for as long as the sequence.
    """
    told = [n for n in program.graph.graph.find_nodes(op="placeholder") if program.inputs.get(n.name) in inputs]
    below = set(walk(told, readers))
    found = [n for n in program.graph.graph.nodes if _keeps_apart(n, below)]
    longest = max((shape_of(n)[2] for n in found), default=0)
    return Documents(frozenset(n.name for n in found), min(mean or longest, longest))


def _keeps_apart(node: fx.Node, below: Collection[fx.Node]) -> bool:
    if node.target is not aten.scaled_dot_product_attention.default or is_random(node):
        return False
    mask = named(node)["attn_mask"]
    is_told = isinstance(mask, fx.Node) and mask in below and not mask.meta.get("grad")
    return is_told and len(shape_of(node)) == 4
