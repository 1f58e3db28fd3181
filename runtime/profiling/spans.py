"""Activities of a rank over time: nested spans, consecutive on each level.

between | step 3                                                                            | between
        | check batch | denominators | begin | F0.0   | F1.0   | B0.0 … | sum of gradients | update
                                             | wait | | wait |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from planner.pipeline.links import Message
from planner.pipeline.schedule import Action
from runtime.distributed.faults.activity import BETWEEN, FORWARD, Now

STEP = "batch"  # the call that makes a step
NAMES = {STEP: "check batch", FORWARD: "begin"}


class Span(NamedTuple):
    """``kind``: step, action, wait, phase (of a step) or call. ``step``: its number, from 1; 0 outside of steps.

    ``stage`` and ``action``: of an action. ``message``: that a wait was for. Seconds of the rank's own clock.
    """

    name: str
    kind: str
    start: float
    end: float
    step: int = 0
    stage: int | None = None
    action: Action | None = None
    message: Message | None = None

    @classmethod
    def of_json(cls, given: Sequence[Any]) -> Span:
        """From the lists that JSON has in place of tuples."""
        span = cls(*given)
        action, message = span.action and Action(*span.action), span.message and Message(*span.message)
        return span._replace(action=action, message=message)


Change = tuple[Now, float]
Waited = tuple[Message | None, float, float]


def spans_of(changes: Sequence[Change], waits: Iterable[Waited]) -> list[Span]:
    """``changes``: the rank's activity from each moment on; each ends the one before, and the last one is no span.

    In order of start, the outer before the inner.
    """
    found = [_wait(*waited) for waited in waits]
    call: list[tuple[Now, float, float]] = []
    for (now, start), (_, end) in pairwise(changes):
        if now.phase == BETWEEN:
            found += [*_call(call), Span(BETWEEN, "call", start, end)]
            call = []
        else:
            call.append((now, start, end))
    return sorted([*found, *_call(call)], key=lambda span: (span.start, -span.end, _DEPTH[span.kind]))


def _call(phases: Sequence[tuple[Now, float, float]]) -> Iterator[Span]:
    """A call between others, which bears the name of its first phase, and its phases in it."""
    if not phases:
        return
    (now, start, _), (_, _, end) = phases[0], phases[-1]
    step = now.step + 1 if now.phase == STEP else 0
    yield Span(f"step {step}", "step", start, end, step) if step else Span(now.phase, "call", start, end)
    for phase in phases:
        yield _inner(*phase, step)


_DEPTH = {"step": 0, "call": 0, "phase": 1, "action": 1, "wait": 2}


def _inner(now: Now, start: float, end: float, step: int) -> Span:
    if now.action is not None:
        return Span(str(now.action), "action", start, end, step, now.stage, now.action)
    return Span(NAMES.get(now.phase, now.phase), "phase", start, end, step)


def _wait(message: Message | None, start: float, end: float) -> Span:
    return Span("wait", "wait", start, end, message=message)
