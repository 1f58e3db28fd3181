"""Few cases of a test that stand for all: a covering array, or a sample. Both depend on the ids of the cases alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import combinations
from zlib import crc32


def cover(cases: Mapping[str, Iterable[str]], strength: int, wholes: Iterable[Iterable[str]] | None = None) -> set[str]:
    """The ids of a covering array, found greedily: any ``strength`` values that meet in a case meet in a chosen one.

    ``cases``: id -> values, each with the name of its parameter. A case of fewer values counts as what it has.
    ``wholes``: of each case, more that stands in a chosen one, by itself.
    """
    singles = ([] for _ in cases) if wholes is None else wholes
    open_tuples = {
        case: _tuples(sorted(values), strength) | _tuples(sorted(single), 1)
        for (case, values), single in zip(cases.items(), singles, strict=True)
    }
    chosen: set[str] = set()
    while any(open_tuples.values()):
        best = min(open_tuples, key=lambda case: (-len(open_tuples[case]), _shuffled(case)))
        chosen.add(best)
        met = open_tuples.pop(best)
        open_tuples = {case: left - met for case, left in open_tuples.items()}
    return chosen


def sample(ids: Collection[str], most: int) -> set[str]:
    """``most`` of the ids, spread over them; all where there are no more. Other ids change few of those chosen."""
    return set(sorted(ids, key=_shuffled)[:most])


def _tuples(values: list[str], strength: int) -> set[tuple[str, ...]]:
    return set(combinations(values, min(strength, len(values)))) - {()}


def _shuffled(case: str) -> tuple[int, str]:
    """An order that is the same everywhere, in which neighbours of a list do not stand together."""
    return crc32(case.encode()), case
