"""The profile of a run: every rank records some steps, one exchange gathers them, and rank 0 writes the trace.

Device times are read only after the profiled steps. Processes of a host share a clock; other hosts ask rank 0 for the
time:

    rank r: t₀ → rank 0: t → rank r: t₁        offset = t − (t₀ + t₁)/2, wrong by at most (t₁ − t₀)/2

The fastest of several rounds counts (Cristian 1989, "Probabilistic clock synchronization").
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from passes.errors import PlanError, Where
from planner.files.atomic import write_for_user
from planner.files.text import writing
from planner.frozen_plan import Plan
from planner.mesh import Mesh
from runtime.distributed.agreement import agreed, all_gather_json, gather_json, of_kind
from runtime.distributed.faults.activity import GRADIENTS, Activity, Now
from runtime.distributed.faults.watch import host_key
from runtime.distributed.groups import Groups
from runtime.distributed.marks import Mark, Marks
from runtime.engine.engine import Engine
from runtime.pipeline.p2p import Wait, Waits
from runtime.profiling.trace import PlannedRun, Span, planned_run, spans_of, trace_of

ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Window:
    """The steps to profile. ``5``: five steps after the slow first one; ``10:13``: steps 10 to 13, counted from 1."""

    first: int | None
    last: int
    text: str

    @classmethod
    def parse(cls, text: str, num_steps: int) -> Window:
        """Parse ``--profile``. Raises PlanError for other text, and for steps beyond ``num_steps``."""
        match = re.fullmatch(r"(?:(\d+):)?(\d+)", text.strip(), re.ASCII)
        if match is None or len(text) > 20:
            raise _error(f"{text!r} is not a number or range of steps")
        first, last = int(match[1]) if match[1] else None, int(match[2])
        if last < 1 or (first is not None and not 1 <= first <= last):
            raise _error(f"{text} is not a range of steps; steps count from 1")
        end = last if first is not None else last + 1
        if end > num_steps:
            raise _error(f"--profile {text} ends at step {end}, but the run has {num_steps} steps")
        return cls(first, last, text)

    def steps(self, num_done: int) -> range:
        """Return the numbers of the steps in a run that resumes after ``num_done`` steps."""
        if self.first is None:
            return range(num_done + 2, num_done + 2 + self.last)
        return range(max(self.first, num_done + 1), self.last + 1)


def _error(what: str) -> PlanError:
    fix = "write a number of steps, such as 3, or the first and the last, such as 10:13; or train longer"
    return PlanError(what, where="--profile", fix=fix)


class Profile:
    """Records the steps of ``window`` into the file ``path``. ``leads``: this is rank 0.

    Every rank creates it before the engine of ``plan``, calls ``before_step`` and ``after_step`` around each step, with
    its number from 1, and ``finish`` after the last step.
    """

    def __init__(self, window: Window, path: str, plan: Plan, cluster: str | None, *, leads: bool) -> None:
        self.window, self.path = window, path
        self._planned = planned_run(plan, cluster) if leads else None
        self._recorder: Recorder | None = None

    def attach(self, engine: Engine) -> None:
        """Set the engine, after it has loaded the state from which the run resumes."""
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
        ahead = self._offset.seconds
        spans = [span._replace(start=span.start + ahead, end=span.end + ahead) for span in recorder.end()]
        records = gather_json(groups, (spans, self._offset), of_kind(tuple[list[Span], Offset]))
        with agreed(groups):
            if records and self._planned is not None:
                trace = json.dumps(profile_of(records, self._planned, groups.mesh), separators=(",", ":"))
                with writing("the trace", Where(file=self.path)):
                    write_for_user(Path(self.path), trace)
                num_steps = len({span.step for span in spans if span.step})
                print(f"trace of {num_steps} steps: {self.path}", file=sys.stderr, flush=True)


def profile_of(records: list[tuple[list[Span], Offset]], planned: PlannedRun, mesh: Mesh) -> dict[str, Any]:
    """Return the trace of the records of all ranks."""
    notes = {
        "planned": "seconds from the cluster file" if planned.has_seconds else "units, scaled to each measured step",
        "clocks differ by at most (seconds)": max(offset.error for _, offset in records),
    }
    return trace_of([spans for spans, _ in records], planned, mesh, notes)


class Recorder:
    """Records the activities of one rank, and its waits for messages."""

    def __init__(self, activity: Activity, waits: Waits, device: torch.device) -> None:
        self.activity, self.waits, self.device = activity, waits, device
        self.marks = Marks(device)
        self._changes: list[tuple[Now, Mark]] = []
        self._waits: list[Wait] = []

    def begin(self) -> None:
        """Start recording. Waits for the device, to relate its clock to the host's."""
        self._await_device()
        self._base, self._base_seconds = self.marks.now(), time.perf_counter()
        self._hear(self.activity.now)
        self.activity.listener = self._hear

    def end(self) -> list[Span]:
        """Stop recording; return the activities of the rank, by its host's clock (``time.perf_counter``)."""
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


class Offset(NamedTuple):
    """The ``seconds`` to add to this rank's clock to get rank 0's, within ``error``."""

    seconds: float
    error: float


def offset_to_rank_0(groups: Groups) -> Offset:
    """Return the offset of this rank's clock to rank 0's. All ranks must call it."""
    if groups.host is None:
        return Offset(0.0, 0.0)
    hosts = all_gather_json(groups, host_key())
    asking = [hosts.index(key) for key in dict.fromkeys(hosts) if key != hosts[0]]
    own = Offset(0.0, 0.0)
    for rank in asking:
        if groups.rank == 0:
            _answer(groups, rank)
        elif groups.rank == rank:
            own = _ask(groups)
    offsets = all_gather_json(groups, own, of_kind(Offset))
    return offsets[hosts.index(hosts[groups.rank])]


def _answer(groups: Groups, rank: int) -> None:
    word = torch.zeros(1, dtype=torch.float64)
    for _ in range(ROUNDS):
        dist.recv(word, rank, group=groups.host)
        word.fill_(time.perf_counter())
        dist.send(word, rank, group=groups.host)


def _ask(groups: Groups) -> Offset:
    word, offsets = torch.zeros(1, dtype=torch.float64), list[Offset]()
    for _ in range(ROUNDS):
        before = time.perf_counter()
        dist.send(word, 0, group=groups.host)
        dist.recv(word, 0, group=groups.host)
        after = time.perf_counter()
        offsets.append(Offset(word.item() - (before + after) / 2, (after - before) / 2))
    return min(offsets, key=lambda offset: offset.error)
