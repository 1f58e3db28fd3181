"""The kernels of the update rules, element by element: PyTorch's fused ones, and those that it lacks, written out.

A kernel changes nothing if ``found_inf`` is 1, and divides gradients by ``grad_scale``: only the device knows these.

Schedule-free AdamW (Defazio et al. 2024): gradients are taken at y, steps at z, and x, a mean of all z, is
evaluated (runtime.optimizer.main_shards).

    x <- (1 - c)·x + c·z      y = (1 - β)·z + β·x      c: the share of the newest z, by the squares of learning rates

The weights of the model are y. z is kept as its distance d = z - y, which begins at zero as other moments do:

    d' = (1 - c)·(d - lr·β·u)      y' = y + c·d - lr·(1 - β·(1 - c))·u      x = y - d·(1 - β) / β

u: the gradient over its root mean square, and the decay of y.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from planner.updates import Settings

Columns = Mapping[str, list[Tensor]]  # "value", "grad" and the rule's moments: tensors of equal sizes
_COLUMNS = ("value", "grad", "exp_avg_sq", "distance")


class Update(NamedTuple):
    """One update of elements with equal settings. ``steps``: counts of updates before this one, used up."""

    settings: Settings
    columns: Columns
    steps: list[Tensor]
    lr: float
    grad_scale: Tensor | None
    found_inf: Tensor

    @property
    def fused(self) -> dict[str, Any]:
        """Options that all fused kernels have."""
        s = self.settings
        options: dict[str, Any] = {"fused": True, "grad_scale": self.grad_scale, "found_inf": self.found_inf}
        return options | {"maximize": False, "lr": self.lr, "weight_decay": s.weight_decay}

    def rows(self, moment: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        columns = self.columns
        for value, grad, kept in zip(columns["value"], columns["grad"], columns[moment], strict=True):
            yield value, grad if self.grad_scale is None else grad / self.grad_scale, kept


Kernel = Callable[[Update], None]


def _adam(call: Callable[..., None]) -> Kernel:
    def kernel(update: Update) -> None:
        s, columns = update.settings, update.columns
        moments = columns["exp_avg"], columns["exp_avg_sq"]
        options = update.fused | {"amsgrad": False, "eps": s.eps, "beta1": s.betas[0], "beta2": s.betas[1]}
        call(columns["value"], columns["grad"], *moments, [], update.steps, **options)

    return kernel


def _sgd(update: Update) -> None:
    """Run torch's kernel. Its first momentum, the gradient, equals that from a zero buffer, since dampening is 0."""
    s, columns = update.settings, update.columns
    buffers: list[Any] = columns.get("momentum_buffer") or [None] * len(columns["value"])
    options = update.fused | {"momentum": s.momentum, "nesterov": s.nesterov, "dampening": 0.0}
    torch_sgd(columns["value"], columns["grad"], buffers, **options)


def _lion(update: Update) -> None:
    """Run algorithm 2 of Chen et al. 2023."""
    (first, second), skips, lr = update.settings.betas, update.found_inf.bool(), update.lr
    for value, grad, mean in update.rows("exp_avg"):
        change = (mean * first + grad * (1 - first)).sign_()
        value.copy_(torch.where(skips, value, value * (1 - lr * update.settings.weight_decay) - lr * change))
        mean.copy_(torch.where(skips, mean, mean * second + grad * (1 - second)))


def _adagrad(update: Update) -> None:
    """Update as torch's Adagrad, without a decay of the learning rate."""
    s, skips = update.settings, update.found_inf.bool()
    for value, grad, total in update.rows("sum"):
        decayed = grad + s.weight_decay * value
        more = total + decayed * decayed
        value.copy_(torch.where(skips, value, value - update.lr * decayed / (more.sqrt() + s.eps)))
        total.copy_(torch.where(skips, total, more))


def _muon_update(update: Update) -> None:
    """Replace gradients by updates, means of gradients, before the exchange (Jordan et al. 2024)."""
    s, skips = update.settings, update.found_inf.bool()
    for target, (_, grad, mean) in zip(update.columns["grad"], update.rows("momentum_buffer"), strict=True):
        mean.copy_(torch.where(skips, mean, mean.lerp(grad, 1 - s.momentum)))
        target.copy_(torch.where(skips, 0.0, grad.lerp(mean, s.momentum) if s.nesterov else mean))


def _muon_step(update: Update) -> None:
    """Step by the orthogonal factors after the exchange; they contain the matrices' factors of the learning rate."""
    skips, lr = update.found_inf.bool(), update.lr
    for value, change in zip(update.columns["value"], update.columns["grad"], strict=True):
        value.copy_(torch.where(skips, value, value * (1 - lr * update.settings.weight_decay) - lr * change))


def mean_of(value: Tensor, distance: Tensor, s: Settings) -> Tensor:
    """Return x, from y and z - y."""
    return value - distance * ((1 - s.betas[0]) / s.betas[0])


def schedule_free(update: Update) -> None:
    s, lr, skips = update.settings, update.lr, update.found_inf.bool()
    (first, second), columns = s.betas, (update.columns[name] for name in _COLUMNS)
    for value, scaled, square, distance, step in zip(*columns, update.steps, strict=True):
        grad = scaled if update.grad_scale is None else scaled / update.grad_scale
        count = step.double() + 1
        share = newest_share(count, s.warmup)
        mean = square * second + grad * grad * (1 - second)
        change = grad / ((mean / (1 - second**count)).sqrt() + s.eps) + s.weight_decay * value
        moved = value + distance * share - change * (lr * (1 - first * (1 - share)))
        value.copy_(torch.where(skips, value, moved))
        distance.copy_(torch.where(skips, distance, (distance - change * (lr * first)) * (1 - share)))
        square.copy_(torch.where(skips, square, mean))


def newest_share(count: Tensor, warmup: int) -> Tensor:
    """Return c of update ``count`` (from 1): lr² over the sum of all lr², for a constant rate after a warm-up."""
    if warmup < 2:
        return 1 / count
    rising = 6 * count / ((count + 1) * (2 * count + 1))
    return torch.where(count <= warmup, rising, 1 / ((warmup + 1) * (2 * warmup + 1) / (6 * warmup) + count - warmup))


KERNELS: dict[str, Kernel] = {
    "adamw": _adam(torch_adamw),
    "adam": _adam(partial(torch_adam, decoupled_weight_decay=False)),
    "sgd": _sgd,
    "lion": _lion,
    "adagrad": _adagrad,
    "schedule_free_adamw": schedule_free,
    "muon": _muon_update,
}
AFTER_EXCHANGE: dict[str, Kernel] = {"muon": _muon_step}
