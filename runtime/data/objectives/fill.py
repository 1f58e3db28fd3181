"""Pieces of a text to sequences of one length, with as little padding as a look at a few thousand pieces allows.

    pieces    5 3 8 2 6 …   →   [5 3] [8] [6 2] …      sequences of 8

Within a block of pieces the longest goes first, each into the sequence with the least room that takes it (best fit,
decreasing): the lists depend on nothing but the sizes.
"""

from __future__ import annotations

import numpy as np

BLOCK = 4096  # pieces that are sorted together: neighbours in the text stay near each other


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
