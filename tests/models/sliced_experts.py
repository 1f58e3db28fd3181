"""Loops over experts with matrices that are parts of stacks, one index at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.experts import Layer, Way


class Sliced(Layer):
    """Stacks in several layouts beside those of ``Layer``, and a norm for each expert."""

    def __init__(self, way: Way, hidden: int = 8, width: int = 12, num_experts: int = 4) -> None:
        super().__init__(way, hidden, width, num_experts)
        self.up_bias, self.down_bias = (nn.Parameter(torch.randn(num_experts, n) * 0.1) for n in (width, hidden))
        self.last = nn.Parameter(torch.randn(hidden, width, num_experts) * 0.3)
        self.rows = nn.Parameter(torch.randn(num_experts, width, hidden) * 0.3)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(num_experts))

    def each(self, chosen: Tensor, probs: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """The tokens that chose an expert, and their weights."""
        token, choice = torch.where(chosen.flatten(0, 1) == number)
        return token, probs.flatten(0, 1)[token, choice, None]


def by_index(layer: Sliced, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    rows, y = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
    for number in range(layer.num_experts):
        token, weight = layer.each(chosen, probs, number)
        y = y.index_add(0, token, F.gelu(rows[token] @ layer.up[number]) @ layer.down[number] * weight)
    return y.view_as(x)


def with_biases(layer: Sliced, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for number in range(layer.num_experts):
        inner = F.gelu(x @ layer.up[number] + layer.up_bias[number])
        gate = (probs * (chosen == number)).sum(-1, keepdim=True)
        y = y + (inner @ layer.down[number] + layer.down_bias[number]) * gate
    return y


def unbound(layer: Sliced, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    gates = probs.new_zeros(*probs.shape[:-1], layer.num_experts).scatter(-1, chosen, probs)
    pairs = zip(layer.up.unbind(0), layer.down.unbind(0), strict=True)
    return sum(F.gelu(x @ up) @ down * gates[..., n, None] for n, (up, down) in enumerate(pairs))


def by_rows(layer: Sliced, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Linear layers, each with the rows of its matrix; the chunks of a stack keep a dim of 1."""
    rows, y = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
    for number, down in enumerate(layer.down.chunk(layer.num_experts)):
        token, weight = layer.each(chosen, probs, number)
        inner = F.silu(F.linear(rows[token], layer.rows[number], layer.up_bias[number]))
        y[token] += inner @ down.squeeze(0) * weight
    return y.view_as(x)


def on_the_last_dim(layer: Sliced, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for number in range(layer.num_experts):
        gate = (probs * (chosen == number)).sum(-1, keepdim=True)
        y = y + F.gelu(x @ layer.last[..., number]) @ layer.down[number] * gate
    return y


def after_own_norms(layer: Sliced, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Parts of stacks, and parameters that each expert has alone."""
    y = torch.zeros_like(x)
    for number, norm in enumerate(layer.norms):
        gate = (probs * (chosen == number)).sum(-1, keepdim=True)
        y = y + F.gelu(norm(x) @ layer.up[number]) @ layer.down[number] * gate
    return y


WAYS = (by_index, with_biases, unbound, by_rows, on_the_last_dim, after_own_norms)
