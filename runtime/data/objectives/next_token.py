"""Each token from those before it: windows of a text, one after another.

    packing      | window 0 | window 1 | window 2 |      over the ends of documents; a remainder at the end is dropped
    documents    | document 0 | document 1 | document 2 |    whole, each as if alone
    no packing   | document 0 ··|·· | document 1 |··     inside documents; the last window of each is padded
    pairs        [chosen 0 ··, rejected 0 ···] …         two samples of a row, side by side

Without packing, samples with labels, and documents that are not to be cut, have a sequence each.

Window i begins at the end of window i - 1; its next tokens reach one further, so that every token except the first is
predicted once.

Of documents side by side in a sequence, positions and labels begin again:

    tokens       a b c d | x y | p q r | …padding      length 12
    positions    0 1 2 3   0 1   0 1 2   0 1 2
    documents    0 0 0 0   1 1   2 2 2   3 3 3
    next_tokens  b c d .   y .   q r .   . . .         . counts nowhere
    labels       . b c d   . y   . q r   . . .         shifted in the model: a document's first belongs to no token

Within a block of pieces (runtime.data.objectives.samples) the longest goes first, each into the sequence with the least
room that takes it (best fit, decreasing): the order depends on nothing but the sizes.
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

BLOCK = 4096  # pieces that are sorted together: neighbours in the text stay near each other


def next_token(
    tokens: Tokens, length: int, data: DataSpec, seed: int, roles: Roles = NO_ROLES, within: Within = ALL
) -> Objective:
    """Windows of ``length``. Raises PlanError if the tokens make none."""
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
        found = Pairs(tokens, length, data)
    elif data.packing == "documents":
        check_packed(roles)
        found = PackedDocuments(tokens, length, data, within, roles)
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
        what = f"{tokens.source} holds {held}, a sequence takes {least}"
        raise PlanError(what, where="--data", fix="give a longer text or a shorter inputs shape")
    return found


class Alone:
    """One piece a sequence, or one window of a document with the token behind it."""

    def __init__(self, pieces: Pieces, length: int) -> None:
        self.pieces, self.length, self.num_samples, self.told = pieces, length, len(pieces), pieces.told
        self._padding = pieces.tokens.tokenization.padding

    def sample(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        ids, is_label = self.pieces.of(index)
        return padded(ids, self.length, self._padding, is_label)


class Pairs(Alone):
    """Two samples a sequence, chosen and rejected: roles [2, length]. One that is left out takes its other along."""

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
        pieces = [self.pieces.of(piece) for piece in range(first, int(self._bounds[index]))]
        return packed(pieces, self.length, self._padding, self._roles)


def packed(
    pieces: Sequence[tuple[np.ndarray, np.ndarray]], length: int, padding: int, roles: Roles
) -> dict[str, np.ndarray]:
    """The roles of a sequence. ``pieces``: ids and whether each is a label. ``roles``: which large ones are read."""
    found: dict[str, np.ndarray] = {role: np.full(length, NOTHING) for role in ("next_tokens", "labels")}
    found["tokens"] = np.full(length, padding)
    for role in ("positions", "segments", "attention_mask"):
        found[role] = np.zeros(length, np.int64)
    found["documents"], at = np.full(length, len(pieces)), 0
    for number, (ids, is_label) in enumerate(pieces):
        stop, labels = at + len(ids), np.where(is_label, ids, NOTHING)[1:]
        found["tokens"][at:stop], found["labels"][at + 1 : stop] = ids, labels
        found["next_tokens"][at : stop - 1] = labels
        found["positions"][at:stop], found["documents"][at:stop] = np.arange(len(ids)), number
        found["attention_mask"][at:stop] = 1
        at = stop
    found["positions"][at:] = np.arange(length - at)
    documents = found["documents"]
    if "document_mask" in roles:
        found["document_mask"] = np.tril(documents[:, None] == documents[None, :])[None]
    if "cu_seqlens" in roles:
        ends = np.flatnonzero(np.diff(documents)) + 1
        found["cu_seqlens"] = np.full(roles["cu_seqlens"], length)
        found["cu_seqlens"][: len(ends) + 1] = [0, *ends]
    return found


def check_packed(roles: Roles) -> None:
    """Raise PlanError for roles that do not name documents."""
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
