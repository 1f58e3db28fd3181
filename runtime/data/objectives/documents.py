"""Whole documents side by side in a sequence, each as if it were alone: positions and labels begin again.

    tokens       a b c d | x y | p q r | …padding      length 12
    positions    0 1 2 3   0 1   0 1 2   0 1 2
    documents    0 0 0 0   1 1   2 2 2   3 3 3
    next_tokens  b c d .   y .   q r .   . . .         . counts nowhere
    labels       . b c d   . y   . q r   . . .         shifted in the model: a document's first belongs to no token

A document longer than a sequence is cut into pieces, each a document of its own, or refused (``data.overlong``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from passes.errors import PlanError
from planner.spec.data import DataSpec
from runtime.data.objectives.fill import fill
from runtime.data.objectives.protocol import ALL, NO_ROLES, NOTHING, Roles, Within
from runtime.data.tokens import Tokens


class PackedDocuments:
    """Sequences of ``length``. Owns the pieces of documents (``starts``, ``sizes``: int64 [pieces]) in the order of the
    sequences, and where each sequence ends in it.

    A document of one token asks for nothing, and is left out. ``roles``: with a mask of documents, or their ends: of
    at most as many documents as these have place for.
    """

    def __init__(
        self, tokens: Tokens, length: int, data: DataSpec, within: Within = ALL, roles: Roles = NO_ROLES
    ) -> None:
        self.tokens, self.length, self._roles = tokens, length, roles
        starts, sizes = within.of(tokens)
        self.longest, self.least = int(sizes.max(initial=0)), 2
        if data.overlong == "refuse" and self.longest > length:
            raise _overlong(tokens, length)
        starts, sizes = _pieces(starts, sizes, length)
        most = roles["cu_seqlens"][0] - 2 if "cu_seqlens" in roles else length  # the start, and the padding's end
        order, self._bounds = fill(sizes, length, most)
        self.starts, self.sizes = starts[order], sizes[order]
        self._padding = tokens.tokenization.padding

    @property
    def num_samples(self) -> int:
        """Of one epoch."""
        return len(self._bounds)

    def sample(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        first = int(self._bounds[index - 1]) if index else 0
        found = {role: np.full(self.length, NOTHING) for role in ("next_tokens", "labels")}
        found["tokens"] = np.full(self.length, self._padding)
        for role in ("positions", "documents", "attention_mask"):
            found[role] = np.zeros(self.length, np.int64)
        at, number = 0, 0
        for number, piece in enumerate(range(first, int(self._bounds[index])), 1):
            at = self._put(found, at, number - 1, int(self.starts[piece]), int(self.sizes[piece]))
        found["positions"][at:] = np.arange(self.length - at)
        found["documents"][at:] = number
        found["segments"] = np.zeros(self.length, np.int64)
        return found | dict(self._more(found["documents"]))

    def _more(self, documents: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """What is large, or has a size of its own: if the model reads it."""
        if "document_mask" in self._roles:
            yield "document_mask", np.tril(documents[:, None] == documents[None, :])[None]
        if "cu_seqlens" in self._roles:
            ends = np.flatnonzero(np.diff(documents)) + 1
            found = np.full(self._roles["cu_seqlens"], self.length)
            found[: len(ends) + 1] = [0, *ends]
            yield "cu_seqlens", found

    def _put(self, found: Mapping[str, np.ndarray], at: int, number: int, start: int, size: int) -> int:
        """One piece, from ``at`` on; returns its end."""
        text, here = self.tokens.ids[start : start + size].astype(np.int64), slice(at, at + size)
        found["tokens"][here], found["labels"][at + 1 : at + size] = text, text[1:]
        found["next_tokens"][at : at + size - 1] = text[1:]
        found["positions"][here], found["documents"][here] = np.arange(size), number
        found["attention_mask"][here] = 1
        return at + size


def packed_documents(
    tokens: Tokens, length: int, data: DataSpec, roles: Roles, within: Within = ALL
) -> PackedDocuments:
    """``roles``: those that the model reads, one of which names documents. Raises PlanError if they do not serve."""
    if "cu_seqlens" in roles and roles["cu_seqlens"][0] < 3:
        what = f"cu_seqlens has {roles['cu_seqlens'][0]} numbers: none is left for the end of a document"
        raise PlanError(what, where="inputs", fix="give it two more than documents in a sequence, at most")
    if "attention_mask" in roles and "documents" not in roles:
        raise PlanError(
            "packing: documents with an attention_mask of zeros and ones: it cannot say which tokens are of one "
            "document, and with it Hugging Face models do not look for documents in position_ids",
            where="data.packing",
            fix="remove the input attention_mask",
        )
    return PackedDocuments(tokens, length, data, within, roles)


def _pieces(starts: np.ndarray, sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and sizes of pieces of at most ``length`` tokens, two at least."""
    counts = -(-sizes // length)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its document
    begins = np.repeat(starts, counts) + number * length
    left = np.repeat(starts + sizes, counts) - begins
    found = np.minimum(left, length)
    return begins[found > 1], found[found > 1]


def _overlong(tokens: Tokens, length: int) -> PlanError:
    sizes = np.diff(tokens.ends, prepend=0)
    number = int(np.argmax(sizes > length))
    return PlanError(
        f"document {number} of {tokens.source} has {int(sizes[number])} tokens, a sequence {length}; "
        f"{int((sizes > length).sum())} of {len(sizes)} documents are longer",
        where="data.overlong",
        fix="set overlong: cut, or use a longer inputs shape",
    )
