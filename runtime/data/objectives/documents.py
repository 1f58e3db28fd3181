"""Whole documents side by side in a sequence, each as if it were alone: positions and labels begin again.

    tokens       a b c d | x y | p q r | …padding      length 12
    positions    0 1 2 3   0 1   0 1 2   0 1 2
    documents    0 0 0 0   1 1   2 2 2   3 3 3
    next_tokens  b c d .   y .   q r .   . . .         . counts nowhere
    labels       . b c d   . y   . q r   . . .         shifted in the model: a document's first belongs to no token

A document longer than a sequence is cut into pieces, each a document of its own, left out or refused
(``data.overlong``). Of samples with labels, labels are those tokens alone. Within a block of pieces the longest goes
first, each into the sequence with the least room that takes it (best fit, decreasing): the order depends on nothing but
the sizes.

    pieces    5 3 8 2 6 …   →   [5 3] [8] [6 2] …      sequences of 8
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from passes.errors import PlanError
from planner.spec.data import DataSpec
from runtime.data.objectives.overlong import pieces_of
from runtime.data.objectives.protocol import ALL, NO_ROLES, NOTHING, Roles, Within
from runtime.data.tokens import Tokens

BLOCK = 4096  # pieces that are sorted together: neighbours in the text stay near each other


class PackedDocuments:
    """Sequences of ``length``. Owns the pieces of documents in the order of the sequences, and where each sequence ends
    in it.

    A document of one token asks for nothing, and is left out. ``roles``: with a mask of documents, or their ends: of
    at most as many documents as these have place for.
    """

    def __init__(
        self, tokens: Tokens, length: int, data: DataSpec, within: Within = ALL, roles: Roles = NO_ROLES
    ) -> None:
        self.tokens, self.length, self._roles = tokens, length, roles
        pieces = pieces_of(tokens, length, data.overlong, within)
        most = roles["cu_seqlens"][0] - 2 if "cu_seqlens" in roles else length  # the start, and the padding's end
        order, self._bounds = fill(pieces.sizes, length, most)
        self.pieces, self.told = pieces.taken(order), pieces.told
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
            at = self._put(found, at, number - 1, piece)
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

    def _put(self, found: Mapping[str, np.ndarray], at: int, number: int, piece: int) -> int:
        """One piece, from ``at`` on; returns its end."""
        ids, is_label = self.pieces.of(piece)
        labels, size = np.where(is_label, ids, NOTHING)[1:], len(ids)
        here = slice(at, at + size)
        found["tokens"][here], found["labels"][at + 1 : at + size] = ids, labels
        found["next_tokens"][at : at + size - 1] = labels
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


def fill(sizes: np.ndarray, length: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """``sizes`` [pieces], each at most ``length``; ``most``: pieces of a sequence.

    Returns the pieces in the order of the sequences [pieces], and the end of each sequence in it [sequences]; within a
    sequence they are in the order of the text.
    """
    order: list[int] = []
    ends: list[int] = []
    for start in range(0, len(sizes), BLOCK):
        for members in _block(sizes[start : start + BLOCK], length, most):
            order += [start + piece for piece in sorted(members)]
            ends.append(len(order))
    return np.array(order, np.int64), np.array(ends, np.int64)


def _block(sizes: np.ndarray, length: int, most: int) -> list[list[int]]:
    sequences: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(length + 1)]  # by room, the sequences that have it
    rooms = 0  # bit r: some sequence has room r
    for piece in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[piece])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            sequence = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, sequence = length, len(sequences)
            sequences.append([])
        sequences[sequence].append(piece)
        if len(sequences[sequence]) < most:
            with_room[room - size].append(sequence)
            rooms |= 1 << (room - size)
    return sorted(sequences, key=min)
