"""Seconds of a call while all ranks make it: ranks on one machine share its cores and its memory.

All ranks wait for each other, then make the same number of calls. The slowest rank counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from runtime.distributed.groups import Groups

_MOST_CALLS = 20_000


class Clock:
    """``window``: seconds of one measurement; a single call may take longer."""

    def __init__(self, groups: Groups, window: float) -> None:
        self.groups, self.window = groups, window
        self.device = groups.device

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call; the same number on every rank."""
        first = self._timed(call, 1)  # includes one-time set-up; a slow call is not repeated without need
        once = self._timed(call, 1) if first < self.window else first
        count = min(_MOST_CALLS, int(self.window / once))
        return self._timed(call, count) if count > 1 else min(first, once)

    def _timed(self, call: Callable[[], object], count: int) -> float:
        self._meet()
        began = time.perf_counter()
        for _ in range(count):
            call()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._slowest((time.perf_counter() - began) / count)

    def _meet(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.groups.mesh.world_size > 1:
            dist.barrier(group=self.groups.host)

    def _slowest(self, seconds: float) -> float:
        if self.groups.mesh.world_size == 1:
            return seconds
        value = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.groups.host)
        return float(value)
