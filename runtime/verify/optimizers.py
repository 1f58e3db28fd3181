"""The optimizers of one process: torch's own, and one that it lacks, over whole parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from planner.sharding.groups import Settings, base_of, settings_of
from planner.spec.optimizer import OptimizerSpec


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023: the sign of a mean of gradients, with decoupled weight decay."""

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any) -> None:
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(first * mean + (1 - first) * p.grad))
                mean.mul_(second).add_(p.grad, alpha=1 - second)


def optimizer_of(model: nn.Module, o: OptimizerSpec) -> torch.optim.Optimizer:
    """Over the trained parameters; each group also has the ``factor`` of its learning rate."""
    groups = _groups(model, o)
    match o.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=o.lr)
        case "adam":
            return torch.optim.Adam(groups, lr=o.lr)
        case "sgd":
            return torch.optim.SGD(groups, lr=o.lr, momentum=o.momentum, nesterov=o.nesterov)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=o.lr)
        case "lion":
            return Lion(groups, lr=o.lr)


@dataclass(frozen=True, slots=True)
class _Parameter:
    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...]


def _groups(model: nn.Module, optimizer: OptimizerSpec) -> list[dict[str, Any]]:
    """The trained parameters, by their settings, as torch takes them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    named = {names[id(p)][0]: p for p in model.parameters()}
    rows = [_Parameter(name, tuple(p.shape), tuple(names[id(p)][1:])) for name, p in named.items()]
    own, base = settings_of(optimizer, rows), base_of(optimizer)
    found: dict[Settings, list[nn.Parameter]] = {}
    for name, parameter in named.items():
        if parameter.requires_grad:
            found.setdefault(own.get(name, base), []).append(parameter)
    keys = ("betas", "eps", "weight_decay")
    return [
        {"params": held, "factor": settings.factor(base), **{key: getattr(settings, key) for key in keys}}
        for settings, held in found.items()
    ]
