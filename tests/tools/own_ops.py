"""Ops of a user's own, with rules, and a model of them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import planner

CHANNELS, LENGTH, VOCABULARY = 16, 6, 32


@torch.library.custom_op("meshwright_tests::gelu_linear", mutates_args=())
def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As a kernel that multiplies and activates in one."""
    return F.gelu(F.linear(x, weight, bias))


@torch.library.custom_op("meshwright_tests::gelu_linear_backward", mutates_args=())
def gelu_linear_backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inner = torch.ops.aten.gelu_backward(grad, F.linear(x, weight, bias))
    rows = inner.flatten(0, -2)
    return inner @ weight, rows.T @ x.flatten(0, -2), rows.sum(0)


@torch.library.custom_op("meshwright_tests::half_linear", mutates_args=())
def half_linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight) / 2


@torch.library.custom_op("meshwright_tests::half_linear_backward", mutates_args=())
def half_linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return grad @ weight / 2, grad.flatten(0, -2).T @ x.flatten(0, -2) / 2


@torch.library.custom_op("meshwright_tests::decayed", mutates_args=())
def decayed(x: Tensor, decay: Tensor) -> Tensor:
    """y[:, t] = decay · y[:, t - 1] + x[:, t], as the scan of a recurrent model."""
    rows, state = [], torch.zeros_like(x[:, 0])
    for row in x.unbind(1):
        state = decay * state + row
        rows.append(state)
    return torch.stack(rows, 1)


@torch.library.custom_op("meshwright_tests::decayed_backward", mutates_args=())
def decayed_backward(grad: Tensor, y: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    inner, of_decay, state = [], torch.zeros_like(decay), torch.zeros_like(grad[:, 0])
    for t in reversed(range(grad.shape[1])):
        state = decay * state + grad[:, t]
        inner.append(state)
        of_decay += (state * y[:, t - 1]).sum(0) if t else torch.zeros_like(decay)
    return torch.stack(inner[::-1], 1), of_decay


gelu_linear.register_fake(lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]))
gelu_linear_backward.register_fake(
    lambda grad, x, w, b: (torch.empty_like(x), torch.empty_like(w), torch.empty_like(b))
)
gelu_linear.register_autograd(
    lambda ctx, grad: gelu_linear_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
half_linear.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0]))
half_linear_backward.register_fake(lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight)))
half_linear.register_autograd(
    lambda ctx, grad: half_linear_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
decayed.register_fake(lambda x, decay: torch.empty_like(x))
decayed_backward.register_fake(lambda grad, y, decay: (torch.empty_like(grad), torch.empty_like(decay)))
decayed.register_autograd(
    lambda ctx, grad: decayed_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output, inputs[1]),
)

planner.rule(
    "meshwright_tests::gelu_linear", "... i^, o i^, o -> ... o", flops=lambda n: 2 * n["..."] * n["i"] * n["o"]
)
planner.rule("meshwright_tests::half_linear", "... i+, o i+ -> ... o")
planner.rule("meshwright_tests::decayed", "b s^ c, c -> b s^ c")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS)
        self.weight = nn.Parameter(torch.randn(4 * CHANNELS, CHANNELS) / 4)
        self.bias = nn.Parameter(torch.randn(4 * CHANNELS) / 4)
        self.decay = nn.Parameter(torch.rand(4 * CHANNELS))
        self.down = nn.Parameter(torch.randn(CHANNELS, 4 * CHANNELS) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + half_linear(decayed(gelu_linear(self.norm(x), self.weight, self.bias), self.decay), self.down)


class OfOwnOps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, CHANNELS)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(CHANNELS, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build() -> OfOwnOps:
    torch.manual_seed(0)
    return OfOwnOps().double()


def spec_of(**mesh: int) -> dict[str, Any]:
    ids = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
    return {"mesh": mesh, "batch": {"global": 4, "micro": 2}, "inputs": {"ids": ids, "labels": ids}}
