"""The profile of a run: some steps are recorded on every rank, gathered in one exchange, written by rank 0.

Marks of a rank's activities during profiled steps. The device is read only after them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from passes.errors import PlanError, Where
from planner.files.atomic import write_for_user
from planner.frozen_plan import Plan
from planner.mesh import Mesh
from runtime.distributed.agreement import agreed
from runtime.distributed.exchange_json import gather_json
from runtime.distributed.faults.activity import GRADIENTS, Activity, Now
from runtime.distributed.marks import Mark, Marks
from runtime.engine import Engine
from runtime.pipeline.waits import Wait, Waits
from runtime.profiling.clocks import Offset, offset_to_rank_0
from runtime.profiling.planned import PlannedRun, planned_run
from runtime.profiling.spans import Span, spans_of
from runtime.profiling.trace import trace_of
from runtime.profiling.window import Window


class Profile:
    """The steps to record, and the file. Owns the recorder while they run, and the planned times.

    ``before_step`` and ``after_step`` are called on every rank around each step, with its number from 1; ``finish``
    once after the last step that is made.
    """

    def __init__(self, window: Window, path: str, plan: Plan, cluster: str | None, *, leads: bool) -> None:
        """Before an engine is made of ``plan``. ``leads``: this is rank 0."""
        self.window, self.path = window, path
        self._planned = planned_run(plan, cluster) if leads else None
        self._recorder: Recorder | None = None

    def attach(self, engine: Engine) -> None:
        """``engine`` has made or loaded the steps before the first one of this run."""
        self._engine = engine
        self._steps = self.window.steps(engine.step_index)
        if not self._steps and engine.groups.rank == 0:
            print(f"nothing to profile: steps {self.window.text} are already done", file=sys.stderr, flush=True)

    def before_step(self, number: int) -> None:
        if self._recorder is None and self._steps and number == self._steps[0]:
            engine = self._engine
            self._offset = offset_to_rank_0(engine.groups)
            self._recorder = Recorder(
                engine.groups.faults.activity, engine.executor.transport.waits, engine.groups.device
            )
            self._recorder.begin()

    def after_step(self, number: int) -> None:
        if self._steps and number == self._steps[-1]:
            self.finish()

    def finish(self) -> None:
        """Write the recorded steps that are not yet written, if any."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        self._steps = range(0)
        groups = self._engine.groups
        spans = [_shifted(span, self._offset) for span in recorder.end()]
        found = gather_json(groups, (spans, self._offset), _recorded)
        with agreed(groups):
            if found and self._planned is not None:
                write_trace(self.path, profile_of(found, self._planned, groups.mesh))
                print(f"trace of {len(_steps_of(spans))} steps: {self.path}", file=sys.stderr, flush=True)


def profile_of(found: list[tuple[list[Span], Offset]], planned: PlannedRun, mesh: Mesh) -> dict[str, Any]:
    """The trace of the ranks' records."""
    notes = {
        "planned": "seconds from the cluster file" if planned.has_seconds else "units, scaled to each measured step",
        "clocks differ by at most (seconds)": max(offset.error for _, offset in found),
    }
    return trace_of([spans for spans, _ in found], planned, mesh, notes)


def write_trace(path: str, trace: dict[str, Any]) -> None:
    """Writes atomically. Raises PlanError, naming the file."""
    try:
        write_for_user(Path(path), json.dumps(trace, separators=(",", ":")))
    except OSError as error:
        raise PlanError(
            f"cannot write the trace: {error.strerror}", where=Where(file=path), fix="give a writable file"
        ) from error


def _recorded(given: Sequence[Any]) -> tuple[list[Span], Offset]:
    """Of one rank, as it came in JSON."""
    spans, offset = given
    return [Span.of_json(span) for span in spans], Offset(*offset)


def _shifted(span: Span, offset: Offset) -> Span:
    return span._replace(start=span.start + offset.seconds, end=span.end + offset.seconds)


def _steps_of(spans: list[Span]) -> set[int]:
    return {span.step for span in spans if span.step}


# ---- marks of a rank's activities during profiled steps. The device is read only after them


class Recorder:
    """Listens to the activity of one rank. Owns its marks, and the waits of the runs that it has heard of."""

    def __init__(self, activity: Activity, waits: Waits, device: torch.device) -> None:
        self.activity, self.waits, self.device = activity, waits, device
        self.marks = Marks(device)
        self._changes: list[tuple[Now, Mark]] = []
        self._waits: list[Wait] = []

    def begin(self) -> None:
        """Waits for the device: its clock is set by the host's."""
        self._await_device()
        self._base, self._base_seconds = self.marks.now(), time.perf_counter()
        self._hear(self.activity.now)
        self.activity.listener = self._hear

    def end(self) -> list[Span]:
        """The activities of the rank, by its host's clock (``time.perf_counter``)."""
        self.activity.listener = None
        self._await_device()
        changes = [(now, self._seconds(mark)) for now, mark in self._changes]
        waits = [(wait.message, self._seconds(wait.start), self._seconds(wait.end)) for wait in self._waits]
        return spans_of(changes, waits)

    def _hear(self, now: Now) -> None:
        if not self.marks.can_be_set():
            return
        self._changes.append((now, self.marks.now()))
        if now.phase == GRADIENTS:  # a run over the actions is over
            self._waits.extend(self.waits.latest)

    def _seconds(self, mark: Mark) -> float:
        return self._base_seconds + self.marks.seconds(self._base, mark)

    def _await_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
