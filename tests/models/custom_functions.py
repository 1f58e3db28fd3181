"""Functions whose backward is not the derivative of their forward, as people write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function

from passes.program.ops.own_backward import OwnBackward


class Rounded(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        return torch.round(x * steps) / steps

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Sign(Function):
    """Binary activations: the gradient passes where |x| <= 1."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() <= 1)


class Reversed(Function):
    """Domain-adversarial training."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * grads[0], None


class Clamped(Function):
    """An elementwise backward that is not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clamp(-1e-3, 1e-3)


class UnitGradient(Function):
    """Normalises the gradient of each row of features: neither linear nor elementwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / (grads[0].norm(dim=-1, keepdim=True) + 1e-3)


class Ternary(Function):
    """A weight of -1, 0 and 1 times the mean of the whole."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        size = weight.abs().mean()
        return (weight / size).round().clamp(-1, 1) * size

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clone()


class Quantised(Function):
    """Two outputs, of which one has no gradient; steps that are learned, one for each feature."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        levels = torch.round(x / step).clamp(-8, 7)
        ctx.save_for_backward(x, step, levels)
        ctx.mark_non_differentiable(error := levels * step - x)
        return levels * step, error

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, step, levels = ctx.saved_tensors
        by_x = grads[0] if ctx.needs_input_grad[0] else None
        return by_x, (grads[0] * (levels - x / step)).flatten(0, -2).sum(0)


class Multiplier(Function):
    """A router without jitter: only the scores get a gradient, through the chosen experts."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, multiplier: Tensor, chosen: Tensor, gates: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(multiplier, chosen, gates)
        return multiplier * mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        multiplier, chosen, gates = ctx.saved_tensors
        arriving = grads[0] * multiplier
        by_scores = gates * -arriving
        by_scores.scatter_add_(-1, chosen, arriving)
        return by_scores, None, None, None, None


class FusedLoss(Function):
    """Head and cross-entropy in one: gradients are computed in the forward, and scaled in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            rows, ids = x.flatten(0, -2), labels.flatten()
            p = (rows @ weight.t()).softmax(-1)
            loss = -p.gather(-1, ids[:, None]).log().mean()
            p[torch.arange(len(ids)), ids] -= 1
            p /= len(ids)
            ctx.save_for_backward((p @ weight).view_as(x), p.t() @ rows)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        by_x, by_weight = ctx.saved_tensors
        return by_x * grads[0], by_weight * grads[0], None


class NoisyRound(Function):
    """Rounds up or down at random."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.floor(x + torch.rand_like(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def calls_in(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of a graph that are Functions with a backward of their own."""
    return (node for node in graph.nodes if isinstance(node.target, OwnBackward))
