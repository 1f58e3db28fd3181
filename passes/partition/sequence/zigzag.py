"""Zigzag: which tokens of a sequence a rank of cp holds. Causal attention is then as much work on every rank.

    2·cp equal chunks    0 1 2 … 2cp−1
    rank r               chunks r and 2cp−1−r, in that order

The tokens of chunk c see c chunks before them and the half of their own: 2cp−1 chunks and two halves on every rank.
"""

from __future__ import annotations

Range = tuple[int, int]


def chunks(cp: int, rank: int) -> Range:
    """The two chunks of a rank, first to last."""
    return rank, 2 * cp - 1 - rank


def owner(cp: int, chunk: int) -> tuple[int, int]:
    """(rank, 0 or 1): the holder of a chunk, and whether it is the first or second of its two."""
    return (chunk, 0) if chunk < cp else (2 * cp - 1 - chunk, 1)


def rows(size: int, cp: int, rank: int) -> tuple[Range, Range]:
    """[start, end) of each of the two chunks that a rank holds of ``size`` tokens, a multiple of 2·cp."""
    assert size % (2 * cp) == 0, f"{size} tokens are no {2 * cp} equal chunks"
    length = size // (2 * cp)
    first, second = (c * length for c in chunks(cp, rank))
    return (first, first + length), (second, second + length)


def places(size: int, cp: int, rank: int) -> list[int]:
    """The places in the full sequence of a rank's tokens, in the rank's order."""
    return [i for start, end in rows(size, cp, rank) for i in range(start, end)]


def pairs(size: int, cp: int, rank: int) -> int:
    """(token, token that it sees) of causal attention on one rank."""
    return sum((start + 1 + end) * (end - start) // 2 for start, end in rows(size, cp, rank))
