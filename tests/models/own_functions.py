"""Models with Functions whose backward is not the derivative of their forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.custom_functions import (
    Clamped,
    FusedLoss,
    Multiplier,
    Quantised,
    Reversed,
    Rounded,
    Sign,
    Ternary,
    UnitGradient,
)
from tests.models.families import Entry, tokens
from tests.models.own import VOCABULARY, WIDTH, Block, Model, own, stack


class Inner(nn.Module):
    """An MLP whose inner activations go through ``function(module, y)``."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), function
        self.step = nn.Parameter(torch.full((64,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.function(self, self.up(x))) * self.step)


class TernaryMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(F.linear(x, Ternary.apply(self.up.weight), self.up.bias)))


class Routed(nn.Module):
    """Each token to one of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        gates, chosen = scores.softmax(-1), scores.argmax(-1, keepdim=True)
        multiplier = gates.gather(-1, chosen)
        multiplier = Multiplier.apply(scores, multiplier, chosen, gates, torch.ones_like(multiplier))
        parts = [expert(x) * (chosen == i) * multiplier for i, expert in enumerate(self.experts)]
        return torch.stack(parts).sum(0)


class Between(nn.Module):
    """On the residual itself, and on what is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return UnitGradient.apply(Clamped.apply(self.down(F.gelu(self.up(UnitGradient.apply(x))))))


class Fused(Model):
    def forward(self, input_ids: Tensor, labels: Tensor, **masks: Tensor) -> Tensor:
        x = self.run(self.layers, self.tokens(input_ids) + self.positions)
        return FusedLoss.apply(self.norm(x), self.head.weight, labels)


class WithMLP(Block):
    def __init__(self, mlp: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.parts["mlp"] = mlp()


def _quantised(mlp: Inner, y: Tensor) -> Tensor:
    values, error = Quantised.apply(y, mlp.step.abs() + 0.05)
    return values + 0.1 * error


def _in_blocks(mlp: Callable[[], nn.Module]) -> Entry:
    return own(lambda: stack(4, partial(WithMLP, mlp)))


def _inner(function: Callable[[Any, Tensor], Tensor]) -> Callable[[], Entry]:
    return lambda: _in_blocks(partial(Inner, function))


FUNCTIONS: dict[str, Callable[[], Entry]] = {
    "own-round": _inner(lambda _, y: Rounded.apply(y, 8)),
    "own-sign": _inner(lambda _, y: Sign.apply(y)),
    "own-reversed": _inner(lambda _, y: Reversed.apply(y, 0.5)),
    "own-clamped": _inner(lambda _, y: Clamped.apply(y)),
    "own-unit": _inner(lambda _, y: UnitGradient.apply(y)),
    "own-quantised": _inner(_quantised),
    "own-ternary": lambda: _in_blocks(TernaryMLP),
    "own-router": lambda: _in_blocks(Routed),
    "own-between": lambda: _in_blocks(Between),
    "own-fused-loss": lambda: Entry(Fused(stack(4, Block)), tokens(VOCABULARY)),  # a mean over all tokens
}
