"""Next-token prediction: consecutive windows of a text, or whole documents.

    packing      | window 0 | window 1 | window 2 |      across documents; a remainder at the end is dropped
    documents    | document 0 | document 1 | document 2 |    whole documents in one sequence, each as if alone
    no packing   | document 0 ··|·· | document 1 |··     inside documents; the last window of each is padded
    pairs        [chosen 0 ··, rejected 0 ···] …         the two samples of a row, stacked

Without packing, each sample with labels, and each document that must not be cut, has its own sequence.

Window i begins at the end of window i - 1; its next tokens reach one further, so that every token except the first is
predicted once.

With packed documents, positions and labels restart in each document:

    tokens       a b c d | x y | p q r | …padding      length 12
    positions    0 1 2 3   0 1   0 1 2   0 1 2
    documents    0 0 0 0   1 1   2 2 2   3 3 3
    next_tokens  b c d .   y .   q r .   . . .         . does not count in the loss
    labels       . b c d   . y   . q r   . . .         for a model that shifts labels: no token predicts a first one

Packing is best fit decreasing within each block of pieces (runtime.data.objectives.samples): the longest piece first,
each into the sequence with the least sufficient room. The result depends only on the sizes.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from passes.errors import PlanError
from planner.spec.inputs import DataSpec
from runtime.data.objectives.samples import (
    ALL,
    NO_ROLES,
    NOTHING,
    Objective,
    Pieces,
    Roles,
    Within,
    pieces_of,
    windows_of,
)
from runtime.data.tokens import Tokens

BLOCK = 4096  # pieces that are packed together: neighbours in the text stay near each other


def next_token(
    tokens: Tokens, length: int, data: DataSpec, seed: int, roles: Roles = NO_ROLES, within: Within = ALL
) -> Objective:
    """Return samples of ``length`` tokens by ``data.packing`` and ``data.overlong``.

    Raises PlanError if the tokens make none, or if packing contradicts the samples or the lengths.
    """
    if tokens.is_paired and (data.packing or within != ALL):
        what = f"{tokens.source} has pairs of samples, one pair in a row of one length"
        raise PlanError(what, where="data.packing", fix="set packing: false, and one length under inputs")
    if data.packing is True and within != ALL:
        what = "packing: true fills every sequence to the longest length: no batch would be of another"
        fix = "set packing: documents or false, or write one length under inputs"
        raise PlanError(what, where="data.packing", fix=fix)
    if data.packing is True and tokens.is_supervised:
        what = f"packing: true runs on over the ends of samples, and {tokens.source} has samples with labels"
        raise PlanError(what, where="data.packing", fix="set packing: documents or false")
    if tokens.is_paired:
        objective = Pairs(tokens, length, data)
    elif data.packing == "documents":
        check_packed(roles)
        objective = PackedDocuments(tokens, length, data, within, roles)
    elif data.packing:
        objective = Packed(tokens, length)
    elif not tokens.is_supervised and data.overlong == "cut":
        objective = Alone(windows_of(tokens, length, within), length)
    else:
        objective = Alone(pieces_of(tokens, length, data.overlong, within), length)
    if not objective.num_samples:
        unit = "bytes" if tokens.tokenization.name == "bytes" else "tokens"
        size, least = f"{len(tokens.ids)} {unit}", length + 1
        if data.packing is not True:
            size, least = f"{int(within.of(tokens)[1].max(initial=0))} {unit} in its longest document", 2
        what = f"{tokens.source} holds {size}, a sequence takes {least}"
        raise PlanError(what, where="--data", fix="give a longer text or a shorter inputs shape")
    return objective


class Alone:
    """Sequences with one piece each: a document, or a window of one with the next token."""

    def __init__(self, pieces: Pieces, length: int) -> None:
        self.pieces, self.length, self.num_samples, self.told = pieces, length, len(pieces), pieces.told
        self._padding = pieces.tokens.tokenization.padding

    def sample(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        ids, is_label = self.pieces.of(index)
        return padded(ids, self.length, self._padding, is_label)


class Pairs(Alone):
    """Pairs of samples, chosen and rejected: roles [2, length]. If one of a pair is left out, so is the other."""

    def __init__(self, tokens: Tokens, length: int, data: DataSpec) -> None:
        pieces = pieces_of(tokens, length, data.overlong)
        rows = np.searchsorted(tokens.ends, pieces.starts, side="right") // 2
        _, places, counts = np.unique(rows, return_inverse=True, return_counts=True)
        super().__init__(pieces.taken(np.flatnonzero(counts[places] == 2)), length)
        self.num_samples = len(self.pieces) // 2

    def sample(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        both = [super(Pairs, self).sample(2 * index + which, epoch) for which in (0, 1)]
        return {role: np.stack([each[role] for each in both]) for role in both[0]}


class Packed:
    """Consecutive windows of the whole text, across documents."""

    def __init__(self, tokens: Tokens, length: int) -> None:
        self.tokens, self.length = tokens, length
        self.num_samples = max(0, (len(tokens.ids) - 1) // length)

    def sample(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        start = index * self.length
        return padded(self.tokens.ids[start : start + self.length + 1].astype(np.int64), self.length, 0)


def padded(
    window: np.ndarray, length: int, padding: int, is_label: np.ndarray | Literal[True] = True
) -> dict[str, np.ndarray]:
    """Return the roles [length] of a window [up to length + 1], padded; padding does not count in the loss."""
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


class PackedDocuments:
    """Sequences of whole documents. Owns the pieces in the order of the sequences, and the end of each sequence in it.

    Documents of one token are left out: nothing is predicted in them. ``roles``: the shape of ``cu_seqlens`` limits
    the number of documents in a sequence.
    """

    def __init__(
        self, tokens: Tokens, length: int, data: DataSpec, within: Within = ALL, roles: Roles = NO_ROLES
    ) -> None:
        self.tokens, self.length, self._roles = tokens, length, roles
        pieces = pieces_of(tokens, length, data.overlong, within)
        most = roles["cu_seqlens"][0] - 2 if "cu_seqlens" in roles else length  # without 0 and the end of padding
        order, self._bounds = fill(pieces.sizes, length, most)
        self.pieces, self.told = pieces.taken(order), pieces.told
        self._padding = tokens.tokenization.padding

    @property
    def num_samples(self) -> int:
        """Number of samples in an epoch."""
        return len(self._bounds)

    def sample(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        first = int(self._bounds[index - 1]) if index else 0
        pieces = [self.pieces.of(piece) for piece in range(first, int(self._bounds[index]))]
        return packed(pieces, self.length, self._padding, self._roles)


def packed(
    pieces: Sequence[tuple[np.ndarray, np.ndarray]], length: int, padding: int, roles: Roles
) -> dict[str, np.ndarray]:
    """Return the roles of a sequence, int64 [length] each. ``pieces``: ids, and whether each is a label.

    ``roles``: of document_mask [1, length, length] and cu_seqlens, those that the model reads.
    """
    arrays: dict[str, np.ndarray] = {role: np.full(length, NOTHING) for role in ("next_tokens", "labels")}
    arrays["tokens"] = np.full(length, padding)
    for role in ("positions", "segments", "attention_mask"):
        arrays[role] = np.zeros(length, np.int64)
    arrays["documents"], at = np.full(length, len(pieces)), 0
    for number, (ids, is_label) in enumerate(pieces):
        stop, labels = at + len(ids), np.where(is_label, ids, NOTHING)[1:]
        arrays["tokens"][at:stop], arrays["labels"][at + 1 : stop] = ids, labels
        arrays["next_tokens"][at : stop - 1] = labels
        arrays["positions"][at:stop], arrays["documents"][at:stop] = np.arange(len(ids)), number
        arrays["attention_mask"][at:stop] = 1
        at = stop
    arrays["positions"][at:] = np.arange(length - at)
    documents = arrays["documents"]
    if "document_mask" in roles:
        arrays["document_mask"] = np.tril(documents[:, None] == documents[None, :])[None]
    if "cu_seqlens" in roles:
        ends = np.flatnonzero(np.diff(documents)) + 1
        arrays["cu_seqlens"] = np.full(roles["cu_seqlens"], length)
        arrays["cu_seqlens"][: len(ends) + 1] = [0, *ends]
    return arrays


def check_packed(roles: Roles) -> None:
    """Raise PlanError for roles that cannot express packed documents."""
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


def fill(sizes: np.ndarray, length: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack pieces of ``sizes`` [pieces], each at most ``length``, into sequences of at most ``most`` pieces.

    Returns the pieces in the order of the sequences, int64 [pieces], and the end of each sequence in it, int64
    [sequences]. Pieces of a sequence are in the order of the text.
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
