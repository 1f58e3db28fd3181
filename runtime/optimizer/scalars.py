"""Two scalars of a step: the learning rate and the loss scale.

The learning rate is a pure function of the step: linear warm-up, then one of these kinds.

step < warmup      lr·(step + 1)/warmup
constant           lr
cosine             min_lr + (lr - min_lr)·(1 + cos(pi·x))/2       x = (step - warmup)/(steps - warmup), at most 1
linear             lr + (min_lr - lr)·x
polynomial         min_lr + (lr - min_lr)·(1 - x)^power
wsd                lr, then lr + (min_lr - lr)·z                  z = (step - (steps - decay))/decay, from 0 to 1
inverse_root       lr·sqrt(warmup/step), at least min_lr
file.py:function   lr·function(step), without a warm-up

The loss scale of float16 training is large enough that small gradients survive, and halved when one overflows:

    a number in the spec                constant
    dynamic, from 2^15:
    skipped                             scale ← max(1, scale / 2)
    GROWTH_INTERVAL good steps          scale ← 2 · scale

It is on the device, which decides whether a step is skipped: the host need not wait.
"""

import math

import torch
from torch import Tensor

from passes.errors import PlanError
from planner.files.named_code import is_named
from planner.spec.learning_rate import LearningRateSpec, RateFunction
from planner.spec.optimizer import OptimizerSpec
from planner.spec.sections import PrecisionSpec

INITIAL = 2.0**15  # 2^16 is infinite in float16, in which the loss of a model may be
SMALLEST = 1.0
GROWTH_INTERVAL = 2000  # good steps after which the scale doubles


class LearningRate:
    """The rate of each step by a spec. ``fixed``: a rate in place of the schedule's. Raises PlanError for a user's
    function that is not valid.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        self._lr, self._spec = spec.lr, spec.schedule
        self.fixed: float | None = None
        self._own = RateFunction(spec.schedule.kind) if is_named(spec.schedule.kind) else None

    def at(self, step: int) -> float:
        """Return the rate of update number ``step`` (from 0). Raises PlanError for steps: auto without a run."""
        if self.fixed is not None:
            return self.fixed
        if self._own is not None:
            return self._lr * self._own(step)
        if self._spec.steps == "auto":
            what = "steps: auto is the last step of `meshwright train`, and here no run has one"
            raise PlanError(what, where="optimizer.schedule.steps", fix="write a number of steps")
        return scheduled(step, self._lr, self._spec.of_run(0))


def scheduled(step: int, lr: float, schedule: LearningRateSpec) -> float:
    """Return the rate of update number ``step`` (from 0). A decay ends at ``min_lr`` after ``steps`` updates."""
    kind, warmup, least = schedule.kind, schedule.warmup, schedule.min_lr
    if step < warmup:
        return lr * (step + 1) / warmup
    if kind == "constant":
        return lr
    if kind == "inverse_root":
        return max(least, lr * math.sqrt(warmup / step)) if step else lr
    assert isinstance(schedule.steps, int), "the spec requires it of a decay"
    start, end = schedule.steps - schedule.decay if schedule.decay else warmup, schedule.steps
    done = min(1.0, max(0.0, (step - start) / (end - start))) if end > start else 1.0
    left = (1.0 + math.cos(math.pi * done)) / 2.0 if kind == "cosine" else (1.0 - done) ** schedule.power
    return least + (lr - least) * left


class LossScale:
    """The loss scale. ``tensor`` (float32, no dims) multiplies the loss's gradient; None if nothing is scaled.

    Owns the scale and, if it is dynamic, the number of good steps.
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
        """Adapt the scale after an update. ``found_inf``: 1.0 (float32) if it was skipped, else 0.0."""
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
