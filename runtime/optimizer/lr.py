"""The learning rate as a pure function of the step: linear warm-up, then constant, cosine or linear decay.

step < warmup      lr·(step + 1)/warmup
constant           lr
cosine             min_lr + (lr - min_lr)·(1 + cos(pi·x))/2       x = (step - warmup)/(steps - warmup), at most 1
linear             lr + (min_lr - lr)·x
"""

from __future__ import annotations

import math

from passes.errors import PlanError

KINDS = ("constant", "cosine", "linear")


def learning_rate(
    step: int, lr: float, *, kind: str = "constant", warmup: int = 0, steps: int | None = None, min_lr: float = 0.0
) -> float:
    """The rate of update number ``step`` (from 0). After ``steps`` updates a decay has reached ``min_lr`` and stays.

    Raises PlanError for an unknown kind, or a decay without ``steps``.
    """
    if kind not in KINDS:
        raise PlanError(
            f"unknown learning-rate schedule {kind!r}",
            where="optimizer.schedule.kind",
            fix=f"choose one of {', '.join(KINDS)}",
        )
    if step < warmup:
        return lr * (step + 1) / warmup
    if kind == "constant":
        return lr
    if steps is None:
        raise PlanError(
            f"a {kind} decay needs its last step",
            where="optimizer.schedule.steps",
            fix="give optimizer.schedule.steps, the number of updates until min_lr",
        )
    done = min(1.0, (step - warmup) / (steps - warmup)) if steps > warmup else 1.0
    if kind == "linear":
        return lr + (min_lr - lr) * done
    return min_lr + (lr - min_lr) * (1.0 + math.cos(math.pi * done)) / 2.0
