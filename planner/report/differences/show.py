"""Differences for eyes: a table for each of the plan's, a line for each change."""

from __future__ import annotations

from itertools import groupby

from planner.report.differences.change import Change
from planner.report.differences.compare import Differences
from planner.report.section import TIMES, Section
from planner.report.text import sections_text

COLUMNS = ("what", TIMES, "field", "before", "after", "difference")
NOTHING = "no differences: the plans are equal"


def differences_text(found: Differences, before: str, after: str) -> str:
    """Plain text; ``before`` and ``after``: names of the two plans."""
    if not found.any:
        return f"{NOTHING}\n"
    return sections_text([_head(found, before, after), *_sections(found)])


def _head(found: Differences, before: str, after: str) -> Section:
    lines = [f"before  {before}", f"after   {after}"]
    if found.models:
        lines.insert(0, found.models)
    if found.same_decisions:
        lines.append("both plans make the same decisions: only estimates, diagnostics or remarks differ")
    return Section("Differences", note="\n".join(lines))


def _sections(found: Differences) -> list[Section]:
    right = frozenset({TIMES})
    return [
        Section(title, COLUMNS, tuple(map(_cells, changes)), right=right)
        for title, changes in groupby(found.changes, key=lambda item: item.table)
    ]


def _cells(item: Change) -> tuple[str, ...]:
    return item.name, str(item.count), item.field, *item.shown, item.difference
