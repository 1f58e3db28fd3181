"""Each token from those before it: windows of a text, one after another.

    packing      | window 0 | window 1 | window 2 |      over the ends of documents; a remainder at the end is dropped
    documents    | document 0 | document 1 | document 2 |    whole, each as if alone (runtime.data.objectives.documents)
    no packing   | document 0 ··|·· | document 1 |··     inside documents; the last window of each is padded

Without packing, samples with labels, and documents that are not to be cut, have a sequence each.

Window i begins at the end of window i - 1; its next tokens reach one further, so that every token except the first is
predicted once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from passes.errors import PlanError
from planner.spec.data import DataSpec
from runtime.data.objectives.documents import packed_documents
from runtime.data.objectives.overlong import Pieces, pieces_of, windows_of
from runtime.data.objectives.protocol import ALL, NO_ROLES, NOTHING, Objective, Roles, Within
from runtime.data.tokens import Tokens


def next_token(
    tokens: Tokens, length: int, data: DataSpec, seed: int, roles: Roles = NO_ROLES, within: Within = ALL
) -> Objective:
    """Windows of ``length``. Raises PlanError if the tokens make none."""
    if data.packing is True and within != ALL:
        raise PlanError(
            "packing: true fills every sequence to the longest length: no batch would be of another",
            where="data.packing",
            fix="set packing: documents or false, or write one length under inputs",
        )
    if data.packing is True and tokens.is_supervised:
        what = f"packing: true runs on over the ends of samples, and {tokens.source} has samples with labels"
        raise PlanError(what, where="data.packing", fix="set packing: documents or false")
    if data.packing == "documents":
        found = packed_documents(tokens, length, data, roles, within)
    elif data.packing:
        found = Packed(tokens, length)
    elif not tokens.is_supervised and data.overlong == "cut":
        found = Alone(windows_of(tokens, length, within), length)
    else:
        found = Alone(pieces_of(tokens, length, data.overlong, within), length)
    if not found.num_samples:
        unit = "bytes" if tokens.tokenization.name == "bytes" else "tokens"
        held, least = f"{len(tokens.ids)} {unit}", length + 1
        if data.packing is not True:
            held, least = f"{int(within.of(tokens)[1].max(initial=0))} {unit} in its longest document", 2
        raise PlanError(
            f"{tokens.source} holds {held}, a sequence takes {least}",
            where="--data",
            fix="give a longer text or a shorter inputs shape",
        )
    return found


class Alone:
    """One piece a sequence, or one window of a document with the token behind it."""

    def __init__(self, pieces: Pieces, length: int) -> None:
        self.pieces, self.length, self.num_samples, self.told = pieces, length, len(pieces), pieces.told
        self._padding = pieces.tokens.tokenization.padding

    def sample(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        ids, is_label = self.pieces.of(index)
        return padded(ids, self.length, self._padding, is_label)


class Packed:
    """Windows that run on over the ends of documents."""

    def __init__(self, tokens: Tokens, length: int) -> None:
        self.tokens, self.length = tokens, length
        self.num_samples = max(0, (len(tokens.ids) - 1) // length)

    def sample(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        start = index * self.length
        return padded(self.tokens.ids[start : start + self.length + 1].astype(np.int64), self.length, 0)


def padded(
    window: np.ndarray, length: int, padding: int, is_label: np.ndarray | Literal[True] = True
) -> dict[str, np.ndarray]:
    """The roles of a window [up to length + 1], padded; padding counts nowhere."""
    tokens, labels = np.full(length + 1, padding), np.full(length + 1, NOTHING)
    tokens[: len(window)] = window
    labels[: len(window)] = np.where(is_label, window, NOTHING)
    return {
        "tokens": tokens[:-1],
        "next_tokens": labels[1:],
        "labels": labels[:-1],
        "attention_mask": (np.arange(length) < len(window)).astype(np.int64),
        "segments": np.zeros(length, np.int64),
        "positions": np.arange(length),
    }
