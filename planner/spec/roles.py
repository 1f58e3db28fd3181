"""The role of an input by its name, for batches that are made of a text."""

from __future__ import annotations

from collections.abc import Mapping

NAMES = {
    "input_ids": "tokens",
    "tokens": "tokens",
    "idx": "tokens",
    "x": "tokens",
    "targets": "next_tokens",
    "y": "next_tokens",
    "labels": "labels",
    "attention_mask": "attention_mask",
    "token_type_ids": "segments",
    "segment_ids": "segments",
    "position_ids": "positions",
    "document_ids": "documents",
    "doc_ids": "documents",
    "document_mask": "document_mask",
    "cu_seqlens": "cu_seqlens",
    "next_sentence_label": "sentence_order",
    "sentence_order_label": "sentence_order",
}
TELLING = ("documents", "positions", "document_mask", "cu_seqlens")  # by them a model keeps documents apart


def role_of(name: str, given: Mapping[str, str]) -> str | None:
    """``given``: the spec's ``data.inputs``. None if nothing says it."""
    return given.get(name) or NAMES.get(name)
