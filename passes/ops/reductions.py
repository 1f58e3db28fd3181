"""Reductions over a sharded dim, with the full result on every rank: type V → I.

vector_norm   sqrt Σ x²: ranks exchange the sum of squares
amax, amin    ranks exchange theirs; for values without a gradient
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from passes.ops.axis import AxisHandle, widened
from passes.ops.collectives import all_reduce

Tensor = torch.Tensor


def cut_vector_norm(x: Tensor, dims: list[int] | None, keepdim: bool, axis: AxisHandle) -> Tensor:
    """The Euclidean norm of all ranks' ``x`` together over ``dims``; one of them is sharded."""
    reduced = sorted({d % x.dim() for d in dims or range(x.dim())})
    result = _VectorNorm.apply(x, reduced, axis)
    return result if keepdim else result.squeeze(reduced)


def cut_amax(x: Tensor, dims: list[int], keepdim: bool, axis: AxisHandle) -> Tensor:
    return all_reduce(x.amax(dims, keepdim), axis, "forward", dist.ReduceOp.MAX, owned=True)


def cut_amin(x: Tensor, dims: list[int], keepdim: bool, axis: AxisHandle) -> Tensor:
    return all_reduce(x.amin(dims, keepdim), axis, "forward", dist.ReduceOp.MIN, owned=True)


class _VectorNorm(torch.autograd.Function):
    """The gradient of this rank's part is x / norm, and 0 if the norm is 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int], axis: AxisHandle) -> Tensor:
        total = widened(x).square().sum(dims, keepdim=True)
        norm = all_reduce(total, axis, "forward", owned=True).sqrt_()
        ctx.save_for_backward(x, norm)
        return norm.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, norm = ctx.saved_tensors
        scale = (grads[0] / norm).masked_fill_(norm == 0, 0)
        return (x * scale).to(x.dtype), None, None
