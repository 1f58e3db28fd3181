"""The loss scale of float16 training: large enough that small gradients survive, halved when one overflows.

    a number in the spec                constant
    dynamic, from 2^15:
    skipped                             scale ← max(1, scale / 2)
    GROWTH_INTERVAL good steps          scale ← 2 · scale

It is on the device, which decides whether a step is skipped: the host need not wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from planner.spec.sections import PrecisionSpec

INITIAL = 2.0**15  # 2^16 is infinite in float16, in which the loss of a model may be
SMALLEST = 1.0
GROWTH_INTERVAL = 2000  # good steps after which the scale doubles


class LossScale:
    """``tensor`` (float32, no dims) multiplies the loss's gradient; None if nothing is scaled.

    Owns: the scale, and if it is dynamic the count of good steps.
    """

    def __init__(self, precision: PrecisionSpec, device: torch.device) -> None:
        self.tensor: Tensor | None = None
        self.is_dynamic = precision.loss_scale == "dynamic"
        if precision.loss_scale != "none":
            scale = INITIAL if self.is_dynamic else float(precision.loss_scale)
            self.tensor = torch.full((), scale, dtype=torch.float32, device=device)
            self.num_good = torch.zeros((), dtype=torch.int32, device=device)
            self._before = self.tensor.clone()

    @property
    def value(self) -> float:
        """The scale, read from the device; 1 if nothing is scaled."""
        return 1.0 if self.tensor is None else float(self.tensor)

    def update(self, found_inf: Tensor) -> None:
        """After each update. ``found_inf``: 1.0 (float32) if it was skipped, else 0.0."""
        if self.tensor is not None and self.is_dynamic:
            self._before.copy_(self.tensor)
            torch._amp_update_scale_(self.tensor, self.num_good, found_inf, 2.0, 0.5, GROWTH_INTERVAL)
            self.tensor.clamp_(min=SMALLEST)

    @property
    def before(self) -> Tensor | None:
        """The scale of the last step that was updated."""
        return None if self.tensor is None else self._before

    @property
    def is_exhausted(self) -> bool:
        """Whether the last step ran with the smallest scale that there is. Waits for the device."""
        return self.tensor is not None and self.is_dynamic and float(self._before) <= SMALLEST
