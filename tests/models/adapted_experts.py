"""Layers of experts with stacks that are computed: by an adapter of low rank, or from a direction and a size."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization


class LowRank(nn.Module):
    """W[E, i, o] + b a, with the factors of all experts in two matrices, as peft lays them out."""

    def __init__(self, stack: Tensor, rank: int) -> None:
        super().__init__()
        experts, inner, outer = stack.shape
        self.sizes = experts, rank
        self.a = nn.Parameter(torch.randn(experts * rank, inner) * 0.3)
        self.b = nn.Parameter(torch.randn(outer, rank * experts) * 0.3)

    def forward(self, stack: Tensor) -> Tensor:
        experts, rank = self.sizes
        a = self.a.reshape(experts, rank, -1)
        b = self.b.reshape(-1, rank, experts)
        return torch.baddbmm(stack, a.transpose(1, 2), b.permute(2, 1, 0), alpha=0.5)


class Added(LowRank):
    """The same by an einsum and a sum."""

    def forward(self, stack: Tensor) -> Tensor:
        experts, rank = self.sizes
        a, b = self.a.reshape(experts, rank, -1), self.b.reshape(-1, rank, experts)
        return stack + 0.5 * torch.einsum("eri,ore->eio", a, b)


class Normed(nn.Module):
    """Each expert's matrix of size one, times a number of its own."""

    def __init__(self, stack: Tensor, rank: int) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.rand(len(stack), 1, 1) + 0.5)

    def forward(self, stack: Tensor) -> Tensor:
        return self.size * stack / stack.square().sum((1, 2), keepdim=True).sqrt()


class Widened(nn.Module):
    """A number for each feature, which all experts share."""

    def __init__(self, stack: Tensor, rank: int) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.rand(stack.shape[2]) + 0.5)

    def forward(self, stack: Tensor) -> Tensor:
        return stack * self.size


def adapted(layer: nn.Module, kind: type[nn.Module], rank: int = 2, trains: bool = True) -> nn.Module:
    """``layer`` with its stacks ``up`` and ``down`` computed; ``trains``: the stacks themselves too."""
    for name in ("up", "down"):
        stack = getattr(layer, name).requires_grad_(trains)
        register_parametrization(layer, name, kind(stack.detach(), rank))
    return layer
