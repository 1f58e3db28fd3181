"""Seconds of a step, by cause. Not estimated yet: the row stands in the format of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from planner.errors import require


@dataclass(frozen=True, slots=True)
class CostPlan:
    """Estimated seconds of one step, by cause; ``step_seconds`` is their total as the critical path sees it."""

    step_seconds: float
    compute: float
    tp_comm: float = 0.0
    pp_comm: float = 0.0
    pp_bubble: float = 0.0
    dp_comm: float = 0.0
    ep_comm: float = 0.0
    optimizer: float = 0.0

    def __post_init__(self) -> None:
        require(isfinite(self.step_seconds) and self.step_seconds >= 0, f"a step takes {self.step_seconds} seconds")
