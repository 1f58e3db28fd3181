"""Adapters whose weight is made in the forward, and asked for by a drawn number, train over tp as one process does.

LoKr makes it by a Kronecker product, LoHa by a Hadamard product with a backward of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tools.simulated_ranks import assert_equals_one_process


class Hadamard(torch.autograd.Function):
    """(a @ b) * (c @ d) * scale."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor, d: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, c, d, scale)
        return (a @ b) * (c @ d) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        a, b, c, d, scale = ctx.saved_tensors
        scaled = gradients[0] * scale
        left, right = scaled * (c @ d), scaled * (a @ b)
        return left @ b.T, a.T @ left, right @ d.T, c.T @ right, None


class Adapted(nn.Module):
    """A frozen linear and what an adapter adds to its weight."""

    def __init__(self, size: int, made: int, kind: str) -> None:
        super().__init__()
        self.base, self.kind = nn.Linear(size, made).requires_grad_(False), kind
        shapes = ((2, 2), (made // 2, size // 2)) if kind == "kron" else ((made, 2), (2, size)) * 2
        self.parts = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        if (not self.training) or torch.rand(1) > 0.0:
            delta = torch.kron(*self.parts) if self.kind == "kron" else Hadamard.apply(*self.parts, torch.tensor(0.5))
            result = result + F.linear(x, delta.reshape(self.base.weight.shape).to(x.dtype))
        return result


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.up = nn.ModuleList(Adapted(8, 16, kind) for _ in range(2))
        self.down = nn.ModuleList(Adapted(16, 8, kind) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["kron", "hadamard"])
def test_weights_made_by_adapters_over_tp_equal_one_process(kind: str) -> None:
    make: Callable[[], nn.Module] = lambda: Model(kind)  # noqa: E731
    assert_equals_one_process(make, {"ids": torch.arange(24).view(4, 6) % 16})
