"""Feedforward layers that write into parts of their hidden features."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.needless import WIDTH


class Written(nn.Module):
    """``way(hidden)`` [b, s, 4 w] between two linears."""

    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.way(self.up(x)))


def first_features(x: Tensor) -> Tensor:
    out = x.clone()
    out[..., :WIDTH] = F.gelu(x[..., :WIDTH])
    return out


def few_of_many(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[..., :6] = x[..., :6].tanh()
    out[..., 6:] = F.gelu(x[..., 6:])
    return out


def the_rest_is_zero(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[..., : WIDTH + WIDTH // 2] = F.gelu(x[..., : WIDTH + WIDTH // 2])
    return out


def even_and_odd(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[..., ::2] = x[..., ::2] * 2 - x[..., 1::2]
    out[..., 1::2] = x[..., 1::2] + F.gelu(x[..., ::2])
    return out


def every_fourth(x: Tensor) -> Tensor:
    out = F.gelu(x)
    out[..., 1::4] = x[..., 2::4].sin()
    return out


WAYS = {f.__name__: f for f in (first_features, few_of_many, the_rest_is_zero, even_and_odd, every_fourth)}
