"""Runs side by side as tables for a terminal, and as data for a script.

How long each stage's actions took in a trace, beside how long they were planned to take.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from planner.report.section import Section
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


# ---- how long each stage's actions took in a trace, beside how long they were planned to take


@dataclass(frozen=True, slots=True)
class ActionTime:
    """Medians over all actions of one kind on one stage, in milliseconds. ``planned``: None without a plan."""

    run: str
    stage: int
    kind: str
    count: int
    measured: float
    planned: float | None

    @property
    def ratio(self) -> float | None:
        return self.measured / self.planned if self.planned else None


def action_times(run: Run) -> list[ActionTime]:
    """Stage by stage; none if the run has no trace, or its trace no actions."""
    measured, planned = _milliseconds(run.trace, "measured"), _milliseconds(run.trace, "planned")
    return [
        ActionTime(run.name, stage, kind, len(taken), median(taken), _median(planned.get((stage, kind), [])))
        for (stage, kind), taken in sorted(measured.items())
    ]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _milliseconds(events: Sequence[dict[str, Any]], track: str) -> dict[tuple[int, str], list[float]]:
    """By (stage, category) the lengths of the actions on the track of this name, of all ranks."""
    tracks = {
        (e.get("pid"), e.get("tid"))
        for e in events
        if (e.get("ph"), e.get("name")) == ("M", "thread_name") and (e.get("args") or {}).get("name") == track
    }
    found: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for event in events:
        args = event.get("args") or {}
        is_action = isinstance(args.get("stage"), int) and "microbatch" in args and "from_stage" not in args
        is_timed = event.get("ph") == "X" and isinstance(event.get("dur"), (int, float))
        if is_action and is_timed and (event.get("pid"), event.get("tid")) in tracks:
            found[args["stage"], str(event.get("cat"))].append(event["dur"] / 1000)
    return found
