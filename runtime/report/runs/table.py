"""Runs side by side as tables for a terminal, and as data for a script."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from planner.report.section import Section
from runtime.report.runs.actions import action_times
from runtime.report.runs.figures import COLUMNS, summary
from runtime.report.runs.memory import memory_sections
from runtime.report.runs.reading import Run

_ACTIONS = ("run", "stage", "action", "seen", "measured ms", "planned ms", "measured / planned")


def sections_of(runs: Sequence[Run]) -> list[Section]:
    """A table of the runs; with traces, one of the times of their actions; then the memory of their ranks."""
    found = [Section(f"Runs ({len(runs)})", COLUMNS, tuple(map(summary, runs)), right=frozenset(COLUMNS[1:]))]
    times = [time for run in runs for time in action_times(run)]
    cells = tuple(
        (t.run, str(t.stage), t.kind, str(t.count), f"{t.measured:.3f}", _or_none(t.planned, 3), _or_none(t.ratio, 2))
        for t in times
    )
    note = "medians over the traced steps, including waits"
    found += [Section("Time of actions", _ACTIONS, cells, note, frozenset(_ACTIONS[3:]))] if cells else []
    return [*found, *memory_sections(runs)]


def _or_none(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def json_parts(runs: Sequence[Run]) -> Iterator[str]:
    """JSON, part by part, as a log may be larger than memory: every step of every run, the times of its actions, and
    the memory of its ranks; null: not measured."""
    yield "["
    for i, run in enumerate(runs):
        yield f'{"," if i else ""}\n  {{\n    "name": {json.dumps(run.name)},\n    "steps": ['
        for j, row in enumerate(run.rows):
            yield f"{',' if j else ''}\n      {_indented(dataclasses.asdict(row), 6)}"
        actions = [dataclasses.asdict(time) for time in action_times(run)]
        yield f'\n    ],\n    "actions": {_indented(actions, 4)}'
        yield f',\n    "memory": {_indented(run.memory.to_dict() if run.memory else None, 4)}\n  }}'
    yield "\n]\n"


def _indented(value: Any, depth: int) -> str:
    return json.dumps(value, indent=2).replace("\n", "\n" + " " * depth)
