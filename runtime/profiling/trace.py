"""Spans of all ranks as one trace in the JSON of Chrome's about:tracing, which Perfetto reads: ui.perfetto.dev.

A rank is a process with two tracks. *measured*: steps, in them the phases and actions, in those the waits for messages;
an arrow goes from each sender's action to the end of the wait for it. *planned*: the same actions as the plan has them,
from the moment at which the first rank begins its first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from planner.mesh import Mesh
from planner.pipeline.schedule import Action
from runtime.profiling.planned import PlannedRun
from runtime.profiling.spans import Span

MEASURED, PLANNED = 1, 2
_CATEGORIES = {"F": "forward", "B": "backward", "W": "weight gradient"}
Event = dict[str, Any]


def trace_of(ranks: Sequence[Sequence[Span]], planned: PlannedRun, mesh: Mesh, notes: dict[str, Any]) -> dict[str, Any]:
    """``ranks``: the spans of each rank, by rank 0's clock. ``notes``: for a reader of the file."""
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
    return _complete(span.name, category, rank, MEASURED, span.start - origin, span.end - origin, args)


def _args(action: Action, stage: int | None) -> dict[str, Any]:
    return {"microbatch": action.microbatch, "chunk": action.chunk, "stage": stage}


def _complete(name: str, category: str, rank: int, track: int, start: float, end: float, args: dict[str, Any]) -> Event:
    begin = _nanoseconds(start)  # both ends are rounded, not the length: nested events stay nested
    length = _nanoseconds(end) - begin
    times = {"ts": begin / 1000, "dur": length / 1000}
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
                yield _complete(str(action), _CATEGORIES[action.kind], rank, PLANNED, *times, args)


def _arrows(ranks: Sequence[Sequence[Span]], mesh: Mesh, origin: float) -> Iterator[Event]:
    """From the action that sends a message to the end of the wait for it."""
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
    at = (_nanoseconds(seconds) - 1) / 1000  # inside of the span that ends there
    return {"ph": phase, "id": number, "name": "message", "cat": "message", "pid": rank, "tid": MEASURED, "ts": at}
