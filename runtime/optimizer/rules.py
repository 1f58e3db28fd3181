"""The kernels of the update rules, element by element: PyTorch's fused ones, and those that it lacks, written out.

A kernel changes nothing if ``found_inf`` is 1, and divides gradients by ``grad_scale``: only the device knows these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from planner.updates.groups import Settings
from runtime.optimizer.schedule_free import schedule_free

Columns = Mapping[str, list[Tensor]]  # "value", "grad" and the rule's moments: tensors of equal sizes
# of settings, columns, counts of updates before this one (used up), learning rate, grad_scale, found_inf
Kernel = Callable[[Settings, Columns, list[Tensor], float, Tensor | None, Tensor], None]


def _adam(call: Callable[..., None]) -> Kernel:
    def kernel(
        s: Settings, columns: Columns, steps: list[Tensor], lr: float, grad_scale: Tensor | None, found_inf: Tensor
    ) -> None:
        moments = columns["exp_avg"], columns["exp_avg_sq"]
        options: dict[str, Any] = {"fused": True, "grad_scale": grad_scale, "found_inf": found_inf}
        options |= {"amsgrad": False, "maximize": False, "lr": lr, "eps": s.eps, "weight_decay": s.weight_decay}
        options |= {"beta1": s.betas[0], "beta2": s.betas[1]}
        call(columns["value"], columns["grad"], *moments, [], steps, **options)

    return kernel


def _sgd(
    s: Settings, columns: Columns, steps: list[Tensor], lr: float, grad_scale: Tensor | None, found_inf: Tensor
) -> None:
    """A momentum of zero is the first one of torch, as gradients are not damped."""
    buffers: list[Any] = columns.get("momentum_buffer") or [None] * len(columns["value"])
    options: dict[str, Any] = {"fused": True, "grad_scale": grad_scale, "found_inf": found_inf}
    options |= {"lr": lr, "weight_decay": s.weight_decay, "momentum": s.momentum, "nesterov": s.nesterov}
    torch_sgd(columns["value"], columns["grad"], buffers, dampening=0.0, maximize=False, **options)


def _lion(
    s: Settings, columns: Columns, steps: list[Tensor], lr: float, grad_scale: Tensor | None, found_inf: Tensor
) -> None:
    """Chen et al. 2023, algorithm 2."""
    (first, second), skips = s.betas, found_inf.bool()
    for value, grad, mean in _rows(columns, grad_scale, "exp_avg"):
        update = (mean * first + grad * (1 - first)).sign_()
        value.copy_(torch.where(skips, value, value * (1 - lr * s.weight_decay) - lr * update))
        mean.copy_(torch.where(skips, mean, mean * second + grad * (1 - second)))


def _adagrad(
    s: Settings, columns: Columns, steps: list[Tensor], lr: float, grad_scale: Tensor | None, found_inf: Tensor
) -> None:
    """As torch's, without a decay of the learning rate."""
    skips = found_inf.bool()
    for value, grad, total in _rows(columns, grad_scale, "sum"):
        decayed = grad + s.weight_decay * value
        more = total + decayed * decayed
        value.copy_(torch.where(skips, value, value - lr * decayed / (more.sqrt() + s.eps)))
        total.copy_(torch.where(skips, total, more))


def _muon_update(
    s: Settings, columns: Columns, steps: list[Tensor], lr: float, grad_scale: Tensor | None, found_inf: Tensor
) -> None:
    """Before the exchange: the gradient becomes the update, a mean of gradients (Jordan et al. 2024)."""
    skips = found_inf.bool()
    for target, (_, grad, mean) in zip(columns["grad"], _rows(columns, grad_scale, "momentum_buffer"), strict=True):
        mean.copy_(torch.where(skips, mean, mean.lerp(grad, 1 - s.momentum)))
        target.copy_(torch.where(skips, 0.0, grad.lerp(mean, s.momentum) if s.nesterov else mean))


def _muon_step(
    s: Settings, columns: Columns, steps: list[Tensor], lr: float, grad_scale: Tensor | None, found_inf: Tensor
) -> None:
    """After it: by the orthogonal factors, with the matrices' factors of the learning rate in them."""
    skips = found_inf.bool()
    for value, update in zip(columns["value"], columns["grad"], strict=True):
        value.copy_(torch.where(skips, value, value * (1 - lr * s.weight_decay) - lr * update))


def _rows(columns: Columns, grad_scale: Tensor | None, moment: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for value, grad, kept in zip(columns["value"], columns["grad"], columns[moment], strict=True):
        yield value, grad if grad_scale is None else grad / grad_scale, kept


def _decoupled(*args: Any, **options: Any) -> None:
    torch_adamw(*args, **options)


def _added(*args: Any, **options: Any) -> None:
    torch_adam(*args, decoupled_weight_decay=False, **options)


KERNELS: dict[str, Kernel] = {
    "adamw": _adam(_decoupled),
    "adam": _adam(_added),
    "sgd": _sgd,
    "lion": _lion,
    "adagrad": _adagrad,
    "schedule_free_adamw": schedule_free,
    "muon": _muon_update,
}
AFTER_EXCHANGE: dict[str, Kernel] = {"muon": _muon_step}
