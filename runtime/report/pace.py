"""Speed of a run: FLOP/s relative to the peak, time for batches, remaining time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from planner.frozen_plan import Plan

_RECENT = 20  # steps that the time left is judged by


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan's figures of a step. ``flops``: of one device, model FLOPs of forward and backward, without
    recomputation; ``peak``: its FLOPs per second, 0 without a cluster; ``bubble`` of the schedule.
    """

    flops: float
    peak: float
    bubble: float

    @classmethod
    def of(cls, plan: Plan) -> Planned:
        """Of a plan that can run."""
        bubble = plan.schedule.bubble_fraction
        return cls(plan.step_flops(), 0.0 if plan.cost is None else plan.cost.peak, bubble)


class Pace:
    """Owns when the last steps were shown, and how long the last batch took."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.data_seconds = 0.0
        self._shown: deque[tuple[int, float]] = deque(maxlen=_RECENT)

    @contextmanager
    def making_batch(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.data_seconds = time.perf_counter() - begun

    def seconds_left(self, step: int) -> float | None:
        """From now, when ``step`` is shown; None at the first one, which takes longer than others."""
        now = time.perf_counter()
        self._shown.append((step, now))
        first, begun = self._shown[0]
        return None if step == first else (now - begun) / (step - first) * (self.num_steps - step)
