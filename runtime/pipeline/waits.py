"""How long a rank waits for the messages of other stages while it runs its actions: the pipeline's bubble, measured.

    run      from the first action to the end of the last sends
    works    run − its waits for messages
    bubble   1 − (mean over ranks of works) / (run of the first stage, which has the last backward)

``usual`` is the median of ``works`` over the last runs: a rank is slow if its figure is larger than that of a replica.

Times on a GPU come from events. The host does not wait for them: it reports the newest run that the device has
finished.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import NamedTuple

from planner.pipeline.links import Message
from runtime.distributed.marks import Mark, Marks

_USUAL = 5  # runs: one that the machine disturbed is not usual


class Wait(NamedTuple):
    """``message``: None for the end of the last sends."""

    message: Message | None
    start: Mark
    end: Mark


class _Run(NamedTuple):
    start: Mark
    end: Mark
    waits: list[Wait]


class Waits:
    """Owns the waits of the run under way, and the runs that the device has not finished.

    ``num_ranks``: of the pipeline; of one there is no bubble. ``is_alone``: no times are taken.
    ``latest``: the waits of the newest run.
    """

    def __init__(self, marks: Marks, *, num_ranks: int = 2, is_alone: bool = False) -> None:
        self.marks, self.num_ranks, self.is_alone = marks, num_ranks, is_alone
        self.latest: list[Wait] = []
        self._start: Mark | None = None
        self._runs: deque[_Run] = deque(maxlen=8)
        self._newest = 0.0, 0.0
        self._works: deque[float] = deque(maxlen=_USUAL)
        self._is_new = False

    def begin(self) -> None:
        """A run begins."""
        self.latest = []
        self._start = None if self.is_alone or not self.marks.can_be_set() else self.marks.now()

    def now(self) -> Mark | None:
        """The begin of a wait; None outside of a run that is measured."""
        return None if self._start is None else self.marks.now()

    def note(self, message: Message | None, start: Mark | None) -> None:
        """A wait that began at ``start`` is over."""
        if start is not None:
            self.latest.append(Wait(message, start, self.marks.now()))

    def end(self) -> None:
        """The run is over."""
        if self._start is not None:
            self._runs.append(_Run(self._start, self.marks.now(), self.latest))
            self._start, self._is_new = None, True

    def newest(self) -> tuple[float, float]:
        """Seconds that this rank worked, and those of its run: of the newest run that the device has finished.

        Once a step; 0 if nothing was measured since, or the pipeline has one rank.
        """
        if not self._is_new or self.num_ranks == 1:
            return 0.0, 0.0
        self._is_new = False
        self._read()
        return self._newest

    def usual(self) -> float:
        """Seconds that this rank works in a run, median over the last ones; 0 before there are enough."""
        self._read()
        return median_low(self._works) if len(self._works) == _USUAL else 0.0

    def _read(self) -> None:
        """The runs that the device has finished."""
        while self._runs and self.marks.is_past(self._runs[0].end):
            start, end, waits = self._runs.popleft()
            run = self.marks.seconds(start, end)
            self._newest = run - sum(self.marks.seconds(wait.start, wait.end) for wait in waits), run
            self._works.append(self._newest[0])
