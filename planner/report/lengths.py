"""The section of several lengths of a sequence."""

from __future__ import annotations

from planner.report.section import Section
from planner.tables.sizes import format_bytes, format_seconds
from planner.tables.tables import Tables


def lengths_section(plan: Tables) -> Section:
    """A row for each length; the other tables are those of the greatest."""
    rows = tuple(
        (
            str(row.length),
            str(row.sequences),
            str(row.microbatches),
            format_bytes(row.memory),
            format_bytes(row.exchanged),
            "-" if row.seconds is None else format_seconds(row.seconds),
        )
        for row in plan.lengths
    )
    columns = ("length", "sequences", "microbatches", "fullest rank", "exchanged", "a step")
    note = "parameters, stages and optimizer are the same at all lengths; the other tables are of the longest"
    return Section("Lengths", columns, rows, note, frozenset(columns))
