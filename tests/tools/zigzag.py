"""The tokens that a rank of cp holds, one by one."""

from passes.partition.sequence.facts import rows


def places(size: int, cp: int, rank: int) -> list[int]:
    """The places in the full sequence of a rank's tokens, in the rank's order."""
    return [i for start, end in rows(size, cp, rank) for i in range(start, end)]


def pairs(size: int, cp: int, rank: int) -> int:
    """(token, token that it sees) of causal attention on one rank."""
    return sum((start + 1 + end) * (end - start) // 2 for start, end in rows(size, cp, rank))
