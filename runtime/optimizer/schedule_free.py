"""Schedule-free AdamW (Defazio et al. 2024): gradients are taken at y, steps at z, and x, a mean of all z, is
evaluated (runtime.optimizer.average).

    x <- (1 - c)·x + c·z      y = (1 - β)·z + β·x      c: the share of the newest z, by the squares of learning rates

The weights of the model are y. z is kept as its distance d = z - y, which begins at zero as other moments do:

    d' = (1 - c)·(d - lr·β·u)      y' = y + c·d - lr·(1 - β·(1 - c))·u      x = y - d·(1 - β) / β

u: the gradient over its root mean square, and the decay of y.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from planner.updates.groups import Settings


def mean_of(value: Tensor, distance: Tensor, s: Settings) -> Tensor:
    """x, of y and z - y."""
    return value - distance * ((1 - s.betas[0]) / s.betas[0])


def schedule_free(
    s: Settings,
    columns: Mapping[str, list[Tensor]],
    steps: list[Tensor],
    lr: float,
    grad_scale: Tensor | None,
    found_inf: Tensor,
) -> None:
    """A kernel (runtime.optimizer.rules)."""
    (first, second), skips = s.betas, found_inf.bool()
    for value, given, square, distance, step in zip(*(columns[name] for name in _COLUMNS), steps, strict=True):
        grad = given if grad_scale is None else given / grad_scale
        count = step.double() + 1
        share = newest_share(count, s.warmup)
        mean = square * second + grad * grad * (1 - second)
        update = grad / ((mean / (1 - second**count)).sqrt() + s.eps) + s.weight_decay * value
        moved = value + distance * share - update * (lr * (1 - first * (1 - share)))
        value.copy_(torch.where(skips, value, moved))
        distance.copy_(torch.where(skips, distance, (distance - update * (lr * first)) * (1 - share)))
        square.copy_(torch.where(skips, square, mean))


_COLUMNS = ("value", "grad", "exp_avg_sq", "distance")


def newest_share(count: Tensor, warmup: int) -> Tensor:
    """c of update ``count``, from 1: lr² over the sum of all lr² so far, for a constant behind a linear warm-up."""
    if warmup < 2:
        return 1 / count
    rising = 6 * count / ((count + 1) * (2 * count + 1))
    return torch.where(count <= warmup, rising, 1 / ((warmup + 1) * (2 * warmup + 1) / (6 * warmup) + count - warmup))
