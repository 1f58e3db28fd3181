"""Tensors in files or buckets of a size, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def filled(items: Iterable[T], num_bytes: Callable[[T], int], most: int) -> list[list[T]]:
    """``items`` in parts that are filled up to ``most`` bytes; more only for an item that is larger alone."""
    parts: list[list[T]] = []
    size = 0
    for item in items:
        more = num_bytes(item)
        if not parts or size + more > most:
            parts.append([])
            size = 0
        parts[-1].append(item)
        size += more
    return parts
