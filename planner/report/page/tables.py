"""Sections of a plan as tables of a page: which of them a reader may sort and filter."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from planner.report.section import PROSE, Section

FILTERED = 8  # rows from which on a table is searched rather than read


@dataclass(frozen=True, slots=True)
class Table:
    """``id`` names its place in the page. ``sortable``: rows are independent, so that order does not matter."""

    id: str
    section: Section
    sortable: bool
    filtered: bool
    right: tuple[bool, ...]
    wraps: tuple[bool, ...]


def tables_of(sections: Iterable[Section]) -> tuple[Table, ...]:
    """A row that continues the one above it has no name: such a table is not folded."""
    found: list[Table] = []
    for number, section in enumerate(sections):
        sortable = len(section.rows) > 1 and all(any(row[:1]) for row in section.rows)
        words = re.sub(r"[^a-z]+", "-", section.title.lower()).strip("-")
        right = tuple(column in section.right for column in section.columns)
        wraps = tuple(column in PROSE for column in section.columns)
        found.append(Table(f"table-{number}-{words}", section, sortable, len(section.rows) > FILTERED, right, wraps))
    return tuple(found)
