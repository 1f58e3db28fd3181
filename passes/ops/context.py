"""The tokens of one cp rank and those of all, as autograd functions over the axis cp.

    local_rows        whole → this rank's     nothing       backward: the gradient at its places, zeros elsewhere
    gather_sequence   this rank's → whole     all-gather    backward: reduce-scatter

A rank holds two chunks of a sequence (passes.partition.sequence.facts); gathered tokens have its order.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from passes.ops.axis import AxisHandle, Way, all_gather_single, has_values, reduce_scatter_single
from passes.ops.collectives import note
from passes.partition.sequence import facts


def local_rows(x: Tensor, dim: int, axis: AxisHandle) -> Tensor:
    """Take of x [.., s, ..], the same on all ranks, [.., s/cp, ..] of this rank, in memory of its own."""
    if axis.size == 1:
        return x
    chunks = (x.narrow(dim, a, b - a) for a, b in facts.rows(x.shape[dim], axis.size, axis.rank))
    return torch.cat(list(chunks), dim)


def gather_sequence(x: Tensor, dim: int, axis: AxisHandle) -> Tensor:
    """Gather x [.., s/cp, ..] of this rank to [.., s, ..] of all. The gradients of all ranks are added up."""
    if axis.size == 1:
        return x
    there = partial(gathered, dim=dim, axis=axis, phase="forward")
    return Way.apply(x, there, partial(scattered_sum, dim=dim, axis=axis, phase="backward"))


def gathered(x: Tensor, dim: int, axis: AxisHandle, phase: str) -> Tensor:
    """Return the full tensor from all ranks' chunks, without a gradient."""
    return gathered_together((x,), dim, axis, phase)[0]


def gathered_together(tensors: Sequence[Tensor], dim: int, axis: AxisHandle, phase: str) -> list[Tensor]:
    """Return the same of several tensors of one dtype, in one exchange."""
    if axis.size == 1:
        return list(tensors)
    flat = [x.contiguous().view(-1) for x in tensors]
    own = torch.cat(flat) if len(flat) > 1 else flat[0]
    note(axis, "all_gather", phase, own, axis.size)
    parts = own.new_empty((axis.size, own.numel()))
    if has_values(own):
        all_gather_single(parts.view(-1), own, group=axis.group)
    of_tensors = parts.split([x.numel() for x in tensors], 1)
    return [_in_order(of_x.view(axis.size, *x.shape), dim, axis) for x, of_x in zip(tensors, of_tensors, strict=True)]


def _in_order(parts: Tensor, dim: int, axis: AxisHandle) -> Tensor:
    """Return the ranks' parts [cp, ..], as the full sequence."""
    halves = [part.chunk(2, dim) for part in parts.unbind(0)]
    owners = (facts.owner(axis.size, chunk) for chunk in range(2 * axis.size))
    return torch.cat([halves[rank][half] for rank, half in owners], dim)


def scattered_sum(x: Tensor, dim: int, axis: AxisHandle, phase: str) -> Tensor:
    """This rank's chunks of the sum of the ranks' full tensors, without a gradient. Sums are in the dtype of x."""
    return scattered_sums((x,), dim, axis, phase)[0]


def scattered_sums(tensors: Sequence[Tensor], dim: int, axis: AxisHandle, phase: str) -> list[Tensor]:
    """Return the same of several tensors of one dtype, in one exchange."""
    if axis.size == 1:
        return list(tensors)
    sizes = [x.numel() // axis.size for x in tensors]
    parts = tensors[0].new_empty((axis.size, sum(sizes)))
    shapes = [_cut_into(of_x, x, dim, axis) for x, of_x in zip(tensors, parts.split(sizes, 1), strict=True)]
    note(axis, "reduce_scatter", phase, parts)
    out = parts.new_empty(sum(sizes))
    if has_values(out):
        reduce_scatter_single(out, parts.view(-1), group=axis.group)
    return [of_x.view(shape) for of_x, shape in zip(out.split(sizes), shapes, strict=True)]


def _cut_into(parts: Tensor, x: Tensor, dim: int, axis: AxisHandle) -> list[int]:
    """Write into ``parts`` [cp, elements] each rank's chunks of x; the shape of one rank's."""
    chunks = x.chunk(2 * axis.size, dim)
    shape = [2 * n if d == dim % x.dim() else n for d, n in enumerate(chunks[0].shape)]
    for rank, part in enumerate(parts.unbind(0)):
        first, second = facts.chunks(axis.size, rank)
        torch.cat([chunks[first], chunks[second]], dim, out=part.view(shape))
    return shape
