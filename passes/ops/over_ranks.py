"""Softmax, norms and reductions over a sharded dim: ranks exchange the statistics, and never gather the values.

logsumexp     top + log Σ exp(x − top): ranks exchange the maximum, then the sum; type V → I
log_softmax   x − f(logsumexp x): the gradient of the subtrahend is summed over ranks; type V → V
softmax       exp of that
gather        each rank gives its own picked elements and zeros; the sum over ranks is the pick: V → P
layer_norm    (x − mean) / sqrt(var + eps) · w + b: ranks exchange Σ x, then Σ (x − mean)²; type V → V
rms_norm      x / sqrt(mean square + eps) · w: ranks exchange Σ x²; type V → V
vector_norm   sqrt Σ x²: ranks exchange the sum of squares; type V → I
amax, amin    ranks exchange theirs; for values without a gradient; type V → I

Sums of a norm are of type P and read as R, so their gradients are summed over ranks too. Weight and bias are cut as
x is, and may be wider: as in PyTorch, the result has the dtype of x and is rounded once.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from passes.ops.axis import AxisHandle, own_part, widened
from passes.ops.collectives import all_reduce, f, g_f


def cut_logsumexp(x: Tensor, dims: list[int], keepdim: bool, axis: AxisHandle, size: int) -> Tensor:
    """x of this rank, sharded on the one dim in ``dims``, of ``size`` true elements (the rest is padding)."""
    result = _LogSumExp.apply(x, dims[0] % x.dim(), axis, size)
    return result if keepdim else result.squeeze(dims[0])


def cut_log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None, axis: AxisHandle, size: int) -> Tensor:
    """Return this rank's part of ``log_softmax(x, dim)``."""
    wide = widened(x if dtype is None else x.to(dtype))
    total = f(_LogSumExp.apply(wide, dim % x.dim(), axis, size), axis)
    return (wide - total).to(dtype or x.dtype)


def cut_softmax(x: Tensor, dim: int, dtype: torch.dtype | None, axis: AxisHandle, size: int) -> Tensor:
    """Return this rank's part of ``softmax(x, dim)``."""
    wide = widened(x if dtype is None else x.to(dtype))
    return cut_log_softmax(wide, dim, None, axis, size).exp().to(dtype or x.dtype)


def cut_gather(x: Tensor, dim: int, index: Tensor, axis: AxisHandle, size: int) -> Tensor:
    """Return this rank's part (P) of ``x.gather(dim, index)``, x cut evenly on ``dim`` of ``size`` true elements.

    Raises RuntimeError for an index outside of them: no rank would find it.
    """
    known = (index >= 0) & (index < size)
    torch._assert_async(known.all(), f"an index is not in [0, {size}), the elements of the dim")
    local = index - axis.rank * x.shape[dim]
    mine = (local >= 0) & (local < x.shape[dim])
    return x.gather(dim, local.clamp(0, x.shape[dim] - 1)).masked_fill(~mine, 0.0)


class _LogSumExp(torch.autograd.Function):
    """[.., n/tp, ..] → [.., 1, ..], the same on every rank; the gradient is this rank's part of the softmax."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: AxisHandle, size: int) -> Tensor:
        _, true_columns = own_part(x.shape[dim], axis, size)
        wide = widened(x)
        z = wide.narrow(dim, 0, true_columns)
        lowest = torch.full_like(wide.narrow(dim, 0, 1), torch.finfo(wide.dtype).min)
        top = z.amax(dim, keepdim=True) if true_columns else lowest
        top = all_reduce(top.clamp(min=torch.finfo(wide.dtype).min), axis, "forward", dist.ReduceOp.MAX, owned=True)
        parts = torch.zeros_like(wide)
        parts.narrow(dim, 0, true_columns).copy_(z).sub_(top).exp_()
        total = all_reduce(parts.sum(dim, keepdim=True), axis, "forward", owned=True)
        ctx.save_for_backward(parts.div_(total))
        return (top + total.log()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (parts,) = ctx.saved_tensors
        return (parts * grads[0].to(parts.dtype)).to(grads[0].dtype), None, None, None


def cut_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, axis: AxisHandle, size: int
) -> Tensor:
    """x [.., n/tp] of this rank, n = ``size`` features in all: this rank's part of ``layer_norm``."""
    wide = widened(x)
    centered = wide - _mean(wide, axis, size)
    normed = centered * torch.rsqrt(_mean(centered.square(), axis, size) + eps)
    return _scaled(normed, weight, bias).to(x.dtype)


def cut_rms_norm(x: Tensor, weight: Tensor | None, eps: float | None, axis: AxisHandle, size: int) -> Tensor:
    """x [.., n/tp] of this rank, n = ``size`` features in all: this rank's part of ``rms_norm``."""
    wide = widened(x)
    smallest = torch.finfo(wide.dtype).eps if eps is None else eps
    normed = wide * torch.rsqrt(_mean(wide.square(), axis, size) + smallest)
    return _scaled(normed, weight, None).to(x.dtype)


def _mean(x: Tensor, axis: AxisHandle, size: int) -> Tensor:
    return g_f(x.sum(-1, keepdim=True), axis) / size


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


def cut_vector_norm(x: Tensor, dims: list[int] | None, keepdim: bool, axis: AxisHandle) -> Tensor:
    """Return the Euclidean norm of all ranks' ``x`` together over ``dims``; one of them is sharded."""
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
