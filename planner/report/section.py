"""A section of an explained plan: a title, columns and cells."""

from __future__ import annotations

from dataclasses import dataclass

TIMES = "\N{MULTIPLICATION SIGN}"  # heading: the number of rows in this one

# Columns that may wrap; names and shapes are not wrapped.
PROSE = frozenset(
    {"reason", "what", "fix", "where", "receives", "sends", "order", "names", "inputs", "outputs", "before", "after"}
    | {"choice", "layout"}
)


@dataclass(frozen=True, slots=True)
class Section:
    """A table: every row has one cell for each of ``columns``; those in ``right`` hold numbers."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""
    right: frozenset[str] = frozenset()
    opened: bool = True  # on a page: else a reader opens it
