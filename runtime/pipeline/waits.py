"""How long a rank waits for the messages of other stages while it runs its actions: the pipeline's bubble, measured.

    run      from the first action to the end of the last sends
    works    run − its waits for messages
    bubble   1 − (mean over ranks of works) / (run of the first stage, whose backward is the last)

Times come by events on a GPU. The host does not wait for them: what it tells is of the newest run that the device has
finished.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from planner.pipeline.links import Message
from runtime.distributed.marks import Mark, Marks


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

    ``is_alone``: the pipeline has one rank, which waits for nobody. ``latest``: the waits of the newest run.
    """

    def __init__(self, marks: Marks, *, is_alone: bool = False) -> None:
        self.marks, self.is_alone = marks, is_alone
        self.latest: list[Wait] = []
        self._start: Mark | None = None
        self._runs: deque[_Run] = deque(maxlen=8)
        self._told = 0.0, 0.0
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

    def told(self) -> tuple[float, float]:
        """Seconds that this rank worked, and those of its run: of the newest run that the device has finished.

        Once a step; 0 where nothing was measured since.
        """
        if not self._is_new:
            return 0.0, 0.0
        self._is_new, finished = False, None
        while self._runs and self.marks.is_past(self._runs[0].end):
            finished = self._runs.popleft()
        if finished is not None:
            run = self.marks.seconds(finished.start, finished.end)
            self._told = run - sum(self.marks.seconds(wait.start, wait.end) for wait in finished.waits), run
        return self._told
