"""Fold rows that differ only in a number inside a dotted name: ``h.0.attn``, ``h.1.attn`` are ``h.{0,1}.attn``, twice.

A fold represents exactly its rows: it takes one number of the name at a time, and only joins items with
equal other parts and equal numbers of rows. Expanding the ranges gives every name equally often.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

_MOST_PARTS = 100  # of a dotted name; more are no modules in modules


@dataclass(frozen=True, slots=True)
class Fold:
    """``rows`` that print as one; ``name`` has ranges for numbers that differ between their names."""

    name: str
    rows: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Item:
    parts: tuple[str, ...]
    key: tuple[Hashable, ...]  # these must be equal; the words after the name come first
    rows: tuple[Any, ...]


def fold(rows: Iterable[Any], name: Callable[[Any], str], same: Callable[[Any], Hashable]) -> list[Fold]:
    """Fold rows that are equal under ``same``, in the order in which each fold begins.

    Only the first word of ``name(row)`` is folded; the rest, a place in a file, must be equal.
    """
    items = []
    for row in rows:
        head, _, tail = name(row).partition(" ")
        items.append(_Item(tuple(head.split(".", _MOST_PARTS)), (tail, same(row)), (row,)))
    items = _join(items, lambda item: (item.parts, item.key), _same_name)
    for position in range(max((len(item.parts) for item in items), default=0)):
        items = _join(items, lambda item, at=position: _all_but_number(item, at), lambda m, at=position: _range(m, at))
    return [Fold(" ".join(filter(None, (".".join(i.parts), str(i.key[0])))), i.rows) for i in items]


def unfolded(rows: Iterable[Any], name: Callable[[Any], str]) -> list[Fold]:
    """Each row for itself."""
    return [Fold(name(row), (row,)) for row in rows]


def _join(
    items: list[_Item], key: Callable[[_Item], Hashable], parts: Callable[[list[_Item]], tuple[str, ...]]
) -> list[_Item]:
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [_Item(parts(m), m[0].key, tuple(row for item in m for row in item.rows)) for m in groups.values()]


def _same_name(members: list[_Item]) -> tuple[str, ...]:
    return members[0].parts


def _all_but_number(item: _Item, position: int) -> Hashable:
    is_number = position < len(item.parts) and item.parts[position].isdecimal() and len(item.parts[position]) < 19
    others = tuple("" if is_number and i == position else part for i, part in enumerate(item.parts))
    return is_number, others, item.key, len(item.rows)


def _range(members: list[_Item], position: int) -> tuple[str, ...]:
    parts = members[0].parts
    if len(members) == 1:
        return parts
    numbers = ranges(int(item.parts[position]) for item in members)
    return (*parts[:position], f"{{{numbers}}}", *parts[position + 1 :])


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as runs: 0, 1, 2, 3, 7 is ``0..3,7``; a run of two is ``0,1``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
