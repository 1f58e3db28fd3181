"""A kernel of an update rule that runs an optimizer of torch.optim on flat tensors (planner.spec.torch_optimizers)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from planner.spec.torch_optimizers import arguments_of, class_of
from planner.updates.groups import Settings
from runtime.optimizer.rules import Columns


def torch_kernel(
    s: Settings, columns: Columns, steps: list[Tensor], lr: float, grad_scale: Tensor | None, found_inf: Tensor
) -> None:
    """One update of all tensors. If it is skipped, values and moments become those of before it again."""
    made: Any = class_of(s.rule)
    skips = found_inf.bool()
    options: dict[str, Any] = arguments_of(s.rule, s.weight_decay, s.options)
    kept = {name: [x.clone() for x in column] for name, column in columns.items() if name != "grad"}
    values = columns["value"]
    if values[0].is_cuda and "capturable" in inspect.signature(made).parameters:
        options["capturable"] = True  # a count on the device stays there
    for value, grad in zip(values, columns["grad"], strict=True):
        value.grad = grad if grad_scale is None else grad / grad_scale.to(grad.dtype)
    optimizer = made(values, lr=lr, **options)
    for index, (value, step) in enumerate(zip(values, steps, strict=True)):
        moments = {name: column[index] for name, column in columns.items() if name not in ("value", "grad")}
        optimizer.state[value] = {"step": step, **moments}
    optimizer.step()
    for name, before in kept.items():
        for now, then in zip(columns[name], before, strict=True):
            now.copy_(torch.where(skips, then, now))
