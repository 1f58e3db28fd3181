"""The facts of a sharding over cp: the number of ranks, and the sequences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Context:
    """``lengths``: tokens of each sequence that is cut, of all ranks."""

    cp: int = 1
    lengths: tuple[int, ...] = ()
