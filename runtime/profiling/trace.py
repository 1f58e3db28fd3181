"""Spans of all ranks as one trace in the JSON of Chrome's about:tracing, for Perfetto (ui.perfetto.dev).

A rank is a process with two tracks. *measured*: steps, with their phases and actions, and in these the waits for
messages; an arrow goes from the sender's action to the end of the wait. *planned*: the same actions by the plan, from
the start of the first action of any rank, with seconds from the cluster file, or units scaled to the measured step.

Spans are nested, and consecutive on each level.

between | step 3                                                                            | between
        | check batch | denominators | begin | F0.0   | F1.0   | B0.0 … | sum of gradients | update
                                             | wait | | wait |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from planner.cluster.cluster import read_cluster
from planner.cost.planned import PlannedSeconds
from planner.frozen_plan import Plan
from planner.mesh import Mesh
from planner.pipeline.links import Message
from planner.pipeline.schedule import Action
from planner.pipeline.simulate import simulate
from planner.spec.spec import Spec
from runtime.distributed.faults.activity import BETWEEN, FORWARD, Now

STEP = "batch"  # the call that makes a step
NAMES = {STEP: "check batch", FORWARD: "begin"}
Change = tuple[Now, float]
Waited = tuple[Message | None, float, float]
_DEPTH = {"step": 0, "call": 0, "phase": 1, "action": 1, "wait": 2}
MEASURED, PLANNED = 1, 2
_CATEGORIES = {"F": "forward", "B": "backward", "W": "weight gradient"}
Event = dict[str, Any]


class Span(NamedTuple):
    """A measured interval of a rank, in seconds of its own clock. ``kind``: step, action, wait, phase (of a step) or
    call. ``step``: its number, from 1; 0 outside of steps. ``stage`` and ``action``: of an action; ``message``: of a
    wait.
    """

    name: str
    kind: str
    start: float
    end: float
    step: int = 0
    stage: int | None = None
    action: Action | None = None
    message: Message | None = None


def spans_of(changes: Sequence[Change], waits: Iterable[Waited]) -> list[Span]:
    """Return the spans of a rank in order of start, outer before inner ones.

    ``changes``: activities and their starts; each lasts until the next, so that the last one has no span.
    """
    spans = [Span("wait", "wait", start, end, message=message) for message, start, end in waits]
    call: list[tuple[Now, float, float]] = []
    for (now, start), (_, end) in pairwise(changes):
        if now.phase == BETWEEN:
            spans += [*_call(call), Span(BETWEEN, "call", start, end)]
            call = []
        else:
            call.append((now, start, end))
    return sorted([*spans, *_call(call)], key=lambda span: (span.start, -span.end, _DEPTH[span.kind]))


def _call(phases: Sequence[tuple[Now, float, float]]) -> Iterator[Span]:
    """Yield the span of a step or another call, named by its first phase, then those of its phases and actions."""
    if not phases:
        return
    (now, start, _), (_, _, end) = phases[0], phases[-1]
    step = now.step + 1 if now.phase == STEP else 0
    yield Span(f"step {step}", "step", start, end, step) if step else Span(now.phase, "call", start, end)
    for now, start, end in phases:
        if now.action is None:
            yield Span(NAMES.get(now.phase, now.phase), "phase", start, end, step)
        else:
            yield Span(str(now.action), "action", start, end, step, now.stage, now.action)


def trace_of(ranks: Sequence[Sequence[Span]], planned: PlannedRun, mesh: Mesh, notes: dict[str, Any]) -> dict[str, Any]:
    """Return the trace. ``ranks``: the spans of each rank, by rank 0's clock. ``notes``: explanations in the file."""
    origin = min((span.start for spans in ranks for span in spans), default=0.0)
    events = list[Event]()
    for rank, spans in enumerate(ranks):
        events += _names(rank, mesh)
        events += [_measured(rank, span, origin) for span in spans]
    events += _planned(ranks, planned, mesh, origin)
    events += _arrows(ranks, mesh, origin)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": notes}


def _names(rank: int, mesh: Mesh) -> Iterator[Event]:
    place = " · ".join(f"{axis} {at}" for axis, at in mesh.shown_place(rank).items())
    yield _meta("process_name", rank, name=f"rank {rank}" + (f" ({place})" if place else ""))
    yield _meta("process_sort_index", rank, sort_index=rank)
    for track, name in ((MEASURED, "measured"), (PLANNED, "planned")):
        yield _meta("thread_name", rank, track, name=name)
        yield _meta("thread_sort_index", rank, track, sort_index=track)


def _meta(what: str, rank: int, track: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": args}


def _measured(rank: int, span: Span, origin: float) -> Event:
    args: dict[str, Any] = {"step": span.step} if span.step else {}
    if span.action is not None:
        args |= _args(span.action, span.stage)
    if span.message is not None:
        args |= {"from_stage": span.message.sender, "microbatch": span.message.microbatch}
    category = _CATEGORIES[span.action.kind] if span.action is not None else span.kind
    return _complete(span.name, category, rank, MEASURED, (span.start - origin, span.end - origin), args)


def _args(action: Action, stage: int | None) -> dict[str, Any]:
    return {"microbatch": action.microbatch, "chunk": action.chunk, "stage": stage}


def _complete(
    name: str, category: str, rank: int, track: int, ends: tuple[float, float], args: dict[str, Any]
) -> Event:
    begin, end = map(_nanoseconds, ends)  # both ends are rounded, not the length: nested events stay nested
    times = {"ts": begin / 1000, "dur": (end - begin) / 1000}
    return {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": track, **times, "args": args}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _planned(ranks: Sequence[Sequence[Span]], planned: PlannedRun, mesh: Mesh, origin: float) -> Iterator[Event]:
    for step in sorted({span.step for spans in ranks for span in spans if span.kind == "action" and span.step}):
        of_step = [s for spans in ranks for s in spans if s.kind == "action" and s.step == step]
        begun = min(span.start for span in of_step)
        run = planned.scaled(max(span.end for span in of_step) - begun)
        for rank in range(len(ranks)):
            pp = mesh.coordinate(rank)["pp"]
            for action, start, end in run.actions[pp]:
                args = {"step": step, **_args(action, mesh.stages_of(pp)[action.chunk])}
                times = (begun + start - origin, begun + end - origin)
                yield _complete(str(action), _CATEGORIES[action.kind], rank, PLANNED, times, args)


def _arrows(ranks: Sequence[Sequence[Span]], mesh: Mesh, origin: float) -> Iterator[Event]:
    """Yield arrows from the action that sends a message to the end of the wait for it."""
    senders = {(rank, s.step, s.action): s for rank, spans in enumerate(ranks) for s in spans if s.action is not None}
    number = 0
    for rank, spans in enumerate(ranks):
        action: Span | None = None
        for span in spans:
            action = span if span.kind == "action" else action
            if span.kind != "wait" or span.message is None or action is None or not action.step:
                continue
            stage = span.message.sender
            sender = mesh.rank_of(**{**mesh.coordinate(rank), "pp": mesh.pp_rank_of(stage)})
            sent = senders.get(
                (sender, action.step, Action(span.message.kind, span.message.microbatch, mesh.chunk_of(stage)))
            )
            if sent is not None:
                number += 1
                yield _arrow("s", number, sender, sent.end - origin)
                yield _arrow("f", number, rank, span.end - origin) | {"bp": "e"}


def _arrow(phase: str, number: int, rank: int, seconds: float) -> Event:
    at = (_nanoseconds(seconds) - 1) / 1000  # inside the span that ends at this time
    return {"ph": phase, "id": number, "name": "message", "cat": "message", "pid": rank, "tid": MEASURED, "ts": at}


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The planned (action, start, end) of each pp rank. ``has_seconds``: times are seconds by the plan's cost; else
    units, in which a forward takes 1 and a backward 2."""

    actions: tuple[tuple[tuple[Action, float, float], ...], ...]
    duration: float
    has_seconds: bool

    def scaled(self, seconds: float) -> PlannedRun:
        """Return a run without seconds scaled to ``seconds`` in all; one with seconds unchanged."""
        if self.has_seconds or not self.duration:
            return self
        by = seconds / self.duration
        actions = tuple(tuple((a, by * start, by * end) for a, start, end in rank) for rank in self.actions)
        return PlannedRun(actions, seconds, False)


def planned_run(plan: Plan, cluster: str | None) -> PlannedRun:
    """Return the run of a plan, in which messages take no time. ``cluster``: the cluster file of its spec."""
    mesh, row = plan.mesh, plan.schedule
    schedule = row.on(mesh)
    seconds = None
    if cluster is not None and plan.cost is not None:
        spec = Spec.load({**plan.spec, "cluster": None})
        seconds = PlannedSeconds(plan.lowered(), spec).estimate(row, read_cluster(cluster)).stage_costs
    run = simulate(schedule, seconds)
    actions = tuple(
        tuple((action, *span) for action, span in zip(order, spans, strict=True))
        for order, spans in zip(schedule.orders, run.spans, strict=True)
    )
    return PlannedRun(actions, run.duration, seconds is not None)
