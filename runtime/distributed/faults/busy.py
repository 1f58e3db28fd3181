"""How long a rank works in each step, and how long it waits for others: looked at some times a second, from beside.

    busy seconds of a step  =  seconds of a step · looks that found it at work / all looks        over a window of steps

Nothing is measured inside of the step: the watching thread looks at the line of Python that the main thread is at. It
waits where that is torch.distributed's or of a round in shared memory, or asks something under way to be waited for. On
a GPU the host's lines tell nothing of the device, so there is no figure.
"""

from __future__ import annotations

import linecache
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from planner.undisturbed import frame_of
from runtime.distributed.shared_memory import rounds

LOOK_SECONDS = 0.05
WINDOW_SECONDS = 2.0
SLOWER = 2.0  # than the median of those with the same work, to be named
SLOWER_STAGE = 3.0  # than the median of the other stages, where nobody has the same work


class Busy:
    """Owns the counts of one rank's looks, and the figure of its last window."""

    def __init__(self, thread: int | None = None) -> None:
        self._thread = thread or threading.get_ident()
        self._looks = self._at_work = 0
        self._steps, self._since, self._before = 0, time.monotonic(), (0, 0)
        self._seconds = 0.0

    def look(self) -> None:
        """By the watching thread."""
        frame = frame_of(self._thread)
        if frame is not None:
            self._looks += 1
            self._at_work += not _waits(frame)

    def after_step(self) -> float:
        """By the main thread, once a step: the busy seconds of a step; 0 until there is a window."""
        self._steps += 1
        now = time.monotonic()
        looks, at_work = self._looks - self._before[0], self._at_work - self._before[1]
        if now - self._since >= WINDOW_SECONDS and looks:
            share = (at_work + 0.5) / (looks + 1)  # never 0, which stands for not known
            self._seconds = (now - self._since) / self._steps * share
            self._steps, self._since, self._before = 0, now, (self._looks, self._at_work)
        return self._seconds


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that works longer in each step than the others: ``factor`` times as long, ``seconds`` more."""

    rank: int
    factor: float
    seconds: float

    def __str__(self) -> str:
        return f"rank {self.rank} is {self.factor:.1f}× slower: costs {self.seconds:.2g} s a step"


def slowest(busy: Sequence[float], stages: Sequence[int]) -> SlowRank | None:
    """The rank that costs the others most; None where all are about alike, or nothing is known yet.

    Ranks of one pipeline stage have the same work and are compared with each other. A stage of one rank is compared
    with all others: stages differ by nature, so there it takes more to be called slow.
    """
    if len(busy) < 2 or not all(busy):
        return None
    found = [slow for rank in range(len(busy)) if (slow := _slow(rank, busy, stages)) is not None]
    return max(found, key=lambda slow: slow.seconds, default=None)


def _slow(rank: int, busy: Sequence[float], stages: Sequence[int]) -> SlowRank | None:
    alike = [busy[r] for r in range(len(busy)) if r != rank and stages[r] == stages[rank]]
    usual = median_low(alike or [*busy[:rank], *busy[rank + 1 :]])
    factor = busy[rank] / usual
    if factor < (SLOWER if alike else SLOWER_STAGE):
        return None
    return SlowRank(rank, factor, busy[rank] - usual)


def _waits(frame: Any) -> bool:
    file = frame.f_code.co_filename
    if "torch/distributed" in file or file == rounds.__file__:
        return True
    return ".wait(" in linecache.getline(file, frame.f_lineno or 0)  # None between lines
