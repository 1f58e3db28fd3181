"""What a run tells its user: the figures of a step, and before the first one what the plan warns of."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from planner.frozen_plan import Plan


class PlanWarning(UserWarning):
    """Numbers can differ from those of one process, or ranks repeat work; ``plan.diagnostics`` says more."""


def warn_of(plan: Plan, rank: int) -> None:
    """On rank 0: one Python warning for each thing that the plan warns of, however many layers it stands in."""
    rows = {row.what: row for row in plan.diagnostics if row.level == "warning" and rank == 0}
    for row in rows.values():
        place, fix = f" (at {row.where})" if row.where else "", f"; {row.fix}" if row.fix else ""
        warnings.warn(f"{row.what}{place}{fix}", PlanWarning, stacklevel=4)


class StepClock:
    """How long the device worked on a step: the time between two events in its queue, or the host's on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._start, self._end = self._now(), None

    def stop(self) -> None:
        self._end = self._now()

    @property
    def seconds(self) -> float:
        """Waits for the device where the step still runs."""
        assert self._end is not None, "the step has not ended"
        if not self._is_cuda:
            return self._end - self._start
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1000

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class StepReport:
    """One update, the same on every rank. The first figure that is read waits for the device, once for all of them.

    ``loss``: mean over the valid tokens of the global batch. ``grad_norm``: of all parameters, before clipping.
    ``skipped``: the loss or a gradient was not finite, so nothing changed. ``tokens_per_s``: elements of the first
    integer input of the global batch, by this rank's clock; 0 where no batch was run.
    """

    def __init__(self, figures: Tensor, lr: float, num_tokens: int = 0, clock: StepClock | None = None) -> None:
        """``figures``: norm, whether the update was skipped (0 or 1), and loss, on the device."""
        self.lr = lr
        self._figures, self._num_tokens, self._clock = figures, num_tokens, clock

    @cached_property
    def _read(self) -> tuple[float, float, float]:
        norm, skipped, loss = self._figures.tolist()
        return loss, norm, skipped

    @property
    def loss(self) -> float:
        return self._read[0]

    @property
    def grad_norm(self) -> float:
        return self._read[1]

    @property
    def skipped(self) -> bool:
        return bool(self._read[2])

    @cached_property
    def tokens_per_s(self) -> float:
        return self._num_tokens / self._clock.seconds if self._clock is not None else 0.0

    def __repr__(self) -> str:
        fields = ("loss", "grad_norm", "lr", "skipped", "tokens_per_s")
        return f"StepReport({', '.join(f'{name}={getattr(self, name)!r}' for name in fields)})"

    def __getstate__(self) -> dict[str, Any]:
        """Whoever gets it pickled, in another process, has the figures."""
        return {"lr": self.lr, "_read": self._read, "tokens_per_s": self.tokens_per_s}


@dataclass(frozen=True, slots=True)
class StepRow:
    """One line of the log. ``one_process_loss`` is the loss of the single process, where it runs beside."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    skipped: bool = False
    one_process_loss: float | None = None
