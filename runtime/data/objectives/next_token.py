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

import numpy as np

from passes.errors import PlanError
from planner.spec.data import DataSpec
from runtime.data.objectives.documents import packed_documents
from runtime.data.objectives.overlong import Pieces, pieces_of
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
    else:
        found = Packed(tokens, length) if data.packing else _alone(tokens, length, data, within)
    if not found.num_samples:
        unit = "bytes" if tokens.tokenization.name == "bytes" else "tokens"
        longest = "" if data.packing is True else " in its longest document"
        raise PlanError(
            f"{tokens.source} holds {found.longest} {unit}{longest}, a sequence takes {found.least}",
            where="--data",
            fix="give a longer text or a shorter inputs shape",
        )
    return found


def _alone(tokens: Tokens, length: int, data: DataSpec, within: Within) -> OfDocuments | Alone:
    """One document or sample a sequence; or windows inside documents, where longer ones are cut."""
    if not tokens.is_supervised and data.overlong == "cut":
        return OfDocuments(tokens, length, within)
    return Alone(pieces_of(tokens, length, data.overlong, within), length)


class Alone:
    """One piece a sequence."""

    def __init__(self, pieces: Pieces, length: int) -> None:
        self.pieces, self.length, self.num_samples, self.told = pieces, length, len(pieces), pieces.told
        self.longest, self.least = int(pieces.sizes.max(initial=0)), 2
        self._padding = pieces.tokens.tokenization.padding

    def sample(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        ids, is_label = self.pieces.of(index)
        found = _roles(ids, self.length, self._padding)
        labels = np.full(self.length + 1, NOTHING)
        labels[: len(ids)] = np.where(is_label, ids, NOTHING)
        return found | {"labels": labels[:-1], "next_tokens": labels[1:]}


class Packed:
    """Windows that run on over the ends of documents."""

    def __init__(self, tokens: Tokens, length: int) -> None:
        self.tokens, self.length = tokens, length
        self.longest, self.least = len(tokens.ids), length + 1
        self.num_samples = max(0, (len(tokens.ids) - 1) // length)

    def sample(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        start = index * self.length
        return _roles(self.tokens.ids[start : start + self.length + 1].astype(np.int64), self.length, 0)


class OfDocuments:
    """Windows inside documents. Owns the number of windows up to the end of each document (int64 [documents])."""

    def __init__(self, tokens: Tokens, length: int, within: Within = ALL) -> None:
        self.tokens, self.length = tokens, length
        self._starts, sizes = within.of(tokens)
        self._ends = self._starts + sizes
        self.longest, self.least = int(sizes.max(initial=0)), 2
        self._windows = np.cumsum(np.maximum(0, -(-(sizes - 1) // length)))
        self.num_samples = int(self._windows[-1]) if len(self._windows) else 0
        self._padding = tokens.tokenization.padding

    def sample(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        document = int(np.searchsorted(self._windows, index, side="right"))
        before = int(self._windows[document - 1]) if document else 0
        start = int(self._starts[document]) + (index - before) * self.length
        stop = min(start + self.length + 1, int(self._ends[document]))
        return _roles(self.tokens.ids[start:stop].astype(np.int64), self.length, self._padding)


def _roles(window: np.ndarray, length: int, padding: int) -> dict[str, np.ndarray]:
    """The roles of a window [up to length + 1], padded; padding counts nowhere."""
    lack = length + 1 - len(window)
    padded = np.pad(window, (0, lack), constant_values=padding) if lack else window
    held = np.arange(length) < len(window)
    asked = np.arange(1, length + 1) < len(window)
    return {
        "tokens": padded[:-1],
        "next_tokens": np.where(asked, padded[1:], NOTHING),
        "labels": np.where(held, padded[:-1], NOTHING),
        "attention_mask": held.astype(np.int64),
        "segments": np.zeros(length, np.int64),
        "positions": np.arange(length),
    }
