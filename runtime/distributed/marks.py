"""Moments of a rank: events in the queue of its device, or times of the host's clock on a CPU."""

import time
from typing import Any

import torch

Mark = Any  # seconds of the host's clock, or an event that the device passes


class Marks:
    """A clock of marks on a device. Setting a mark takes under 10 µs and does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def now(self) -> Mark:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: Mark) -> bool:
        """Return whether the device has passed the mark."""
        return not self._is_cuda or mark.query()

    def can_be_set(self) -> bool:
        """Return False while a graph is captured: its work has not begun."""
        return not (self._is_cuda and torch.cuda.is_current_stream_capturing())

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds from ``start`` to ``end``; waits until the device has passed both."""
        if not self._is_cuda:
            return end - start
        start.synchronize()
        end.synchronize()
        return start.elapsed_time(end) / 1000
