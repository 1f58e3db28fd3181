"""Marks of a rank's activities during profiled steps. The device is read only after them."""

from __future__ import annotations

import time

import torch

from runtime.distributed.faults.activity import GRADIENTS, Activity, Now
from runtime.distributed.marks import Mark, Marks
from runtime.pipeline.waits import Wait, Waits
from runtime.profiling.spans import Span, spans_of


class Recorder:
    """Listens to the activity of one rank. Owns its marks, and the waits of the runs that it has heard of."""

    def __init__(self, activity: Activity, waits: Waits, device: torch.device) -> None:
        self.activity, self.waits, self.device = activity, waits, device
        self.marks = Marks(device)
        self._changes: list[tuple[Now, Mark]] = []
        self._waits: list[Wait] = []

    def begin(self) -> None:
        """Waits for the device: its clock is set by the host's."""
        self._await_device()
        self._base, self._base_seconds = self.marks.now(), time.perf_counter()
        self._hear(self.activity.now)
        self.activity.listener = self._hear

    def end(self) -> list[Span]:
        """The activities of the rank, by its host's clock (``time.perf_counter``)."""
        self.activity.listener = None
        self._await_device()
        changes = [(now, self._seconds(mark)) for now, mark in self._changes]
        waits = [(wait.message, self._seconds(wait.start), self._seconds(wait.end)) for wait in self._waits]
        return spans_of(changes, waits)

    def _hear(self, now: Now) -> None:
        if not self.marks.can_be_set():
            return
        self._changes.append((now, self.marks.now()))
        if now.phase == GRADIENTS:  # a run over the actions is over
            self._waits.extend(self.waits.latest)

    def _seconds(self, mark: Mark) -> float:
        return self._base_seconds + self.marks.seconds(self._base, mark)

    def _await_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
