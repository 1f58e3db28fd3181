"""Attention that a mask keeps within documents runs block by block (passes.ops.documents).

Needs:   ops of this rank's sizes (passes.localize), and exchanges over cp (passes.exchange_sequence).
"""

from __future__ import annotations

from typing import Any

import torch

from passes.base import LowerContext, StageGraph
from passes.ops.attention import attention_arguments, shared_key_attention
from passes.ops.documents import attention_by_documents
from passes.ops.gathered_attention import gathered_attention

SDPA = torch.ops.aten.scaled_dot_product_attention.default


def attend_by_documents(stage: StageGraph, context: LowerContext) -> None:
    """In place: attention of this rank alone becomes the op; ops that gather or pick keys get an option."""
    documents = context.lowering.documents
    for node in stage.graph.nodes:
        if node.op != "call_function" or node.meta.get("origin") not in documents.attentions:
            continue
        if node.target in (gathered_attention, shared_key_attention):
            node.kwargs = {**node.kwargs, "documents": documents.mean}
        elif node.target is SDPA:
            given: dict[str, Any] = attention_arguments(node.args, node.kwargs)
            options = {name: given[name] for name in ("scale", "enable_gqa") if given.get(name)}
            node.target = attention_by_documents
            node.args = (*node.args[:3], given["mask"], documents.mean)
            node.kwargs = options
