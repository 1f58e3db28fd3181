"""Explicit attention masks that say nothing new: provably causal ones become is_causal, provably full ones go away.

A mask made of constants alone (positions, comparisons) is computed here, once, and examined; of a large one, only the
allowed columns of each row are (mask_rows), and the mask itself only if those are unknown. Flash attention then needs
no mask in memory, and the ops that built it are dead. One that reads a batch tensor or a parameter stays.
"""

from __future__ import annotations

import torch
from torch import fx

from passes.canonical.form import prune
from passes.canonical.mask_rows import MaskRows
from passes.program.constants import Constants
from passes.program.program import Program
from passes.program.source_lines import where_of

aten = torch.ops.aten

LARGE = 1 << 22  # elements: from there on, rows are quicker, and take a thousandth of the memory


def simplify_masks(program: Program) -> None:
    """Rewrite the attention calls of ``program`` in place; ``program.rewrites`` says which and why."""
    meanings: dict[fx.Node, str] = {}
    constants = Constants(program)
    rows = MaskRows(constants)
    for node in program.graph.graph.nodes:
        if node.target is not aten.scaled_dot_product_attention.default or len(node.args) < 4:
            continue
        mask = node.args[3]
        if not isinstance(mask, fx.Node) or mask not in constants.nodes or (len(node.args) > 5 and node.args[5]):
            continue
        if mask not in meanings:
            runs = rows.of(mask) if mask.meta["val"].numel() > LARGE else None
            meanings[mask] = _meaning(constants.value(mask)) if runs is None else runs.meaning()
        if meanings[mask]:
            _replace(node, meanings[mask] == "causal")
            program.rewrites.append((f"the attention mask is {meanings[mask]}", where_of(node)))
    if any(meanings.values()):
        prune(program.graph)
        program.graph_changed()


def _meaning(mask: torch.Tensor | None) -> str:
    """ "causal", "full" or "" for a boolean or an additive mask [.., s, t]."""
    if mask is None or mask.dim() < 2:
        return ""
    if mask.dtype == torch.bool:
        allowed = mask
    else:
        lowest = torch.finfo(mask.dtype).min
        allowed = mask == 0
        if not bool((allowed | (mask <= lowest)).all()):
            return ""
    if bool(allowed.all()):
        return "full"
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return "causal" if mask.shape[-1] == mask.shape[-2] and bool((allowed == causal).all()) else ""


def _replace(node: fx.Node, causal: bool) -> None:
    query, key, value, _, *rest = node.args
    dropout = rest[0] if rest else node.kwargs.get("dropout_p", 0.0)
    node.args = (query, key, value, None, dropout, causal)
    node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("dropout_p", "is_causal", "attn_mask")}
