"""How long each stage's actions took in a trace, beside how long they were planned to take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from runtime.report.runs.reading import Run


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
