"""Runs side by side as tables for a terminal, and as data for a script."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from planner.report.section import Section
from runtime.report.runs.actions import action_times
from runtime.report.runs.figures import COLUMNS, summary
from runtime.report.runs.memory import memory_sections
from runtime.report.runs.reading import Run

_ACTIONS = ("run", "stage", "action", "seen", "measured ms", "planned ms", "measured / planned")


def sections_of(runs: Sequence[Run]) -> list[Section]:
    """A table of the runs; with traces, one of the times of their actions; then what their ranks held."""
    found = [Section(f"Runs ({len(runs)})", COLUMNS, tuple(map(summary, runs)), right=frozenset(COLUMNS[1:]))]
    times = [time for run in runs for time in action_times(run)]
    cells = tuple(
        (t.run, str(t.stage), t.kind, str(t.count), f"{t.measured:.3f}", _or_none(t.planned, 3), _or_none(t.ratio, 2))
        for t in times
    )
    note = "medians over the traced steps, waits included"
    found += [Section("Time of actions", _ACTIONS, cells, note, frozenset(_ACTIONS[3:]))] if cells else []
    return [*found, *memory_sections(runs)]


def _or_none(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def to_dict(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Every step of every run, the times of its actions, and what its ranks held; null: nobody measured that."""
    return [
        {
            "name": run.name,
            "steps": [dataclasses.asdict(row) for row in run.rows],
            "actions": [dataclasses.asdict(time) for time in action_times(run)],
            "memory": run.memory.to_dict() if run.memory else None,
        }
        for run in runs
    ]
