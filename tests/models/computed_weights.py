"""Layers whose products read weights computed in the forward: normed, standardized, ternary, decomposed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from tests.models.needless import WIDTH, attend


def _normed_anew(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return weight_norm(layer)


class Feedforward(nn.Module):
    """Two linears, each changed by ``way``."""

    def __init__(self, way: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.up, self.down = way(nn.Linear(WIDTH, 4 * WIDTH)), way(nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Convolved(Feedforward):
    """Over the tokens, with kernels of which each has mean 0 and variance 1."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.up, self.down = nn.Conv1d(WIDTH, 4 * WIDTH, 3, padding=1), nn.Conv1d(4 * WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for layer, act in ((self.up, F.gelu), (self.down, nn.Identity())):
            weight = layer.weight
            var, mean = torch.var_mean(weight, dim=[1, 2], keepdim=True, correction=0)
            x = act(F.conv1d(x.transpose(1, 2), (weight - mean) * torch.rsqrt(var + 1e-5), padding=1)).transpose(1, 2)
        return x


class UnitRows(nn.Module):
    """Attention and MLP on the sphere: every row or column that has the width of the model is normed (nGPT)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(4))
        self.up, self.down = nn.Parameter(torch.randn(4 * WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH, 4 * WIDTH))
        self.scale = nn.Parameter(torch.ones(4 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, F.normalize(w, dim=-1)) for w in (self.q, self.k, self.v))
        x = F.normalize(x + F.linear(attend(q, k, v), F.normalize(self.o, dim=0)), dim=-1)
        hidden = F.silu(F.linear(x, F.normalize(self.up, dim=-1)) * self.scale)
        return F.linear(hidden, F.normalize(self.down, dim=0))


class Ternary(nn.Linear):
    """Weights in {−1, 0, 1} times their mean size, activations in 8 bits, gradients straight through (BitNet b1.58)."""

    def forward(self, input: Tensor) -> Tensor:
        scale = self.weight.abs().mean().clamp(min=1e-5)
        weight = self.weight + ((self.weight / scale).round().clamp(-1, 1) * scale - self.weight).detach()
        step = input.abs().max(-1, keepdim=True).values.clamp(min=1e-5) / 127
        x = input + ((input / step).round().clamp(-128, 127) * step - input).detach()
        return F.linear(x, weight, self.bias)


class TernaryFeedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Ternary(WIDTH, 4 * WIDTH), Ternary(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Merged(nn.Module):
    """Linears whose weight is a matrix and a product of two thin ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.ups = nn.ParameterList([torch.randn(4 * WIDTH, 2), torch.randn(2, WIDTH)])
        self.downs = nn.ParameterList([torch.randn(WIDTH, 2), torch.randn(2, 4 * WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(F.linear(x, self.up.weight + self.ups[0] @ self.ups[1], self.up.bias))
        return F.linear(x, self.down.weight + self.downs[0] @ self.downs[1], self.down.bias)


COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: Feedforward(_normed_anew),
    "weight norm by a parametrization": lambda: Feedforward(parametrizations.weight_norm),
    "standardized kernels": Convolved,
    "unit rows": UnitRows,
    "ternary": TernaryFeedforward,
    "merged adapters": Merged,
}
