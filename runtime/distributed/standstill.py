"""Ranks that were stopped (SIGSTOP) before they could watch each other: the process that launched them looks.

Whoever has a heartbeat is watched by the other ranks, which see it sooner. A launcher that was stopped itself, as by
Ctrl-Z, counts no time in which it did not look.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from runtime.distributed.faults.judge import STOPPED_SECONDS
from runtime.distributed.faults.processes import start_of, state_of

SECONDS = STOPPED_SECONDS + 4.0
_MOST_BETWEEN = 2.0  # seconds between two looks that count


class Standstill:
    """Owns for how long each rank has been seen stopped."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._looked = time.monotonic()

    def look(self, pids: Mapping[int, int]) -> dict[int, float]:
        """Rank → for how many seconds it has been stopped, of those that count as dead. ``pids``: by rank."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _MOST_BETWEEN), now
        stopped = {rank for rank, pid in pids.items() if state_of(pid, start_of(pid)) == "stopped"}
        self._seconds = {rank: self._seconds.get(rank, 0.0) + passed for rank in stopped}
        return {rank: seconds for rank, seconds in self._seconds.items() if seconds > SECONDS}
