"""The loss scale of float16 training: large enough that small gradients survive, halved when one overflows."""

from __future__ import annotations

from dataclasses import dataclass

from planner.spec.sections import PrecisionSpec

INITIAL = 2.0**16
GROWTH_INTERVAL = 2000  # good steps after which the scale doubles


@dataclass(slots=True)
class LossScale:
    """``value`` multiplies the loss's gradient; always 1 unless ``dynamic``. Owns: the count of good steps."""

    dynamic: bool = False
    value: float = 1.0
    num_good: int = 0

    @classmethod
    def of(cls, precision: PrecisionSpec) -> LossScale:
        return cls(True, INITIAL) if precision.loss_scale == "dynamic" else cls()

    def update(self, *, skipped: bool) -> None:
        """After each update: halve where it was skipped, double after ``GROWTH_INTERVAL`` that were not."""
        if not self.dynamic:
            return
        self.num_good = 0 if skipped else self.num_good + 1
        if skipped:
            self.value = max(1.0, self.value / 2)
        elif self.num_good == GROWTH_INTERVAL:
            self.value, self.num_good = self.value * 2, 0
