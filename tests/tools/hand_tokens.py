"""Tokens of documents that a test writes out."""

from __future__ import annotations

import numpy as np

from runtime.data.tokens import Tokenization, Tokens


def by_hand(*documents: list[int], vocabulary_size: int = 256, **special: int) -> Tokens:
    """Tokens of these documents, each a word."""
    ids = np.array([i for document in documents for i in document], np.int64)
    ends = np.cumsum([len(document) for document in documents])
    words = np.array([len(document) for document in documents])
    how = Tokenization("by hand", vocabulary_size, special)
    return Tokens(ids, ends, np.ones(len(ids), np.uint8), words, how, "by hand", str(hash(tuple(ids.tolist()))))
