"""The tokens of one cp rank and those of all, as autograd functions over the axis cp.

    local_rows        whole → this rank's     nothing       backward: the gradient at its places, zeros elsewhere
    gather_sequence   this rank's → whole     all-gather    backward: reduce-scatter

A rank holds two chunks of a sequence (planner.context.zigzag); what is gathered stands in the order of the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.collectives import note
from passes.ops.runs import all_gather_single, reduce_scatter_single
from planner.context import zigzag


def local_rows(x: Tensor, dim: int, axis: AxisHandle) -> Tensor:
    """x [.., s, ..], the same on all ranks → [.., s/cp, ..] of this rank, in memory of its own."""
    if axis.size == 1:
        return x
    chunks = (x.narrow(dim, a, b - a) for a, b in zigzag.rows(x.shape[dim], axis.size, axis.rank))
    return torch.cat(list(chunks), dim)


def gather_sequence(x: Tensor, dim: int, axis: AxisHandle) -> Tensor:
    """x [.., s/cp, ..] of this rank → [.., s, ..] of all. The gradients of all ranks are added up."""
    return _Gather.apply(x, dim, axis) if axis.size > 1 else x


def gathered(x: Tensor, dim: int, axis: AxisHandle, phase: str) -> Tensor:
    """The whole from all ranks' chunks, without a gradient."""
    if axis.size == 1:
        return x
    note(axis, "all_gather", phase, x, axis.size)
    parts = x.new_empty((axis.size, *x.shape))
    if not x.is_meta:
        all_gather_single(parts.view(-1), x.contiguous().view(-1), group=axis.group)
    halves = [part.chunk(2, dim) for part in parts.unbind(0)]
    owners = (zigzag.owner(axis.size, chunk) for chunk in range(2 * axis.size))
    return torch.cat([halves[rank][half] for rank, half in owners], dim)


def scattered_sum(x: Tensor, dim: int, axis: AxisHandle, phase: str) -> Tensor:
    """This rank's chunks of the sum of the ranks' whole tensors, without a gradient."""
    if axis.size == 1:
        return x
    note(axis, "reduce_scatter", phase, x)
    chunks = x.chunk(2 * axis.size, dim)
    of_ranks = (zigzag.chunks(axis.size, rank) for rank in range(axis.size))
    parts = torch.stack([torch.cat([chunks[a], chunks[b]], dim) for a, b in of_ranks])
    out = x.new_empty(parts.shape[1:])
    if not x.is_meta:
        reduce_scatter_single(out.view(-1), parts.view(-1), group=axis.group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: AxisHandle) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return gathered(x, dim, axis, "forward")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return scattered_sum(grads[0], ctx.dim, ctx.axis, "backward"), None, None
