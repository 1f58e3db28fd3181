"""Stand-ins for the collectives of cp, with the same memory (planner.saved.stand_ins has those of tp).

local_rows              two chunks in memory of their own, nothing kept
gather_sequence         the full tensor, nothing saved
causal_attention        q, k, v, the result, and a number for each row; no scores
gathered_attention      the same of this rank's own k and v
either without flash    tensors saved by plain attention, with a mask for each chunk; or q, k, v alone, with a rerun
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.partition.sequence import zigzag
from passes.program.ops import sequence
from planner.saved.stand_ins import summed


def local_rows(x: Tensor, dim: int, cp: int) -> Tensor:
    return x if cp == 1 else torch.cat([x.narrow(dim, a, b - a) for a, b in zigzag.rows(x.shape[dim], cp, 0)], dim)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, cp: int) -> Tensor:
        ctx.given = dim, cp
        return _whole(x, dim, cp)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _own(grads[0], *ctx.given), None, None


def gather_sequence(x: Tensor, dim: int, cp: int) -> Tensor:
    return _Gathered.apply(x, dim, cp) if cp > 1 else x


def _whole(x: Tensor, dim: int, cp: int) -> Tensor:
    return torch.cat(x.new_empty((cp, *x.shape)).unbind(0), dim)


def _own(x: Tensor, dim: int, cp: int) -> Tensor:
    parts = torch.stack(x.chunk(cp, dim))
    return parts.new_empty(parts.shape[1:])


def _wholes(tensors: Sequence[Tensor], dim: int, cp: int) -> list[Tensor]:
    """Of tensors that are gathered in one exchange."""
    own = torch.cat([x.reshape(-1) for x in tensors])
    parts = own.new_empty((cp, own.numel())).split([x.numel() for x in tensors], 1)
    return [torch.cat(of_x.view(cp, *x.shape).unbind(0), dim) for x, of_x in zip(tensors, parts, strict=True)]


def _owns(tensors: Sequence[Tensor], dim: int, cp: int) -> list[Tensor]:
    """Of sums that are scattered in one exchange."""
    sizes = [x.numel() // cp for x in tensors]
    parts = tensors[0].new_empty((cp, sum(sizes)))
    own = parts.new_empty(sum(sizes)).split(sizes)
    return [part.view(x.chunk(cp, dim)[0].shape) for part, x in zip(own, tensors, strict=True)]


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: int,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    attend: Any = F.scaled_dot_product_attention,
) -> Tensor:
    if dropout_p == 0.0 and _takes(q, k, v):
        return _Attended.apply(q, k, v, None, 1, True)
    found = []
    for rows, (start, end) in zip(q.chunk(2, 2), zigzag.rows(k.shape[2], cp, 0), strict=True):
        keys = torch.arange(end, device=q.device)
        mask = keys[start:].view(-1, 1) >= keys
        operands = (rows, k.narrow(2, 0, end), v.narrow(2, 0, end), mask)
        found.append(attend(*operands, dropout_p=dropout_p, enable_gqa=enable_gqa))
    return torch.cat(found, 2)


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cp: int,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if _takes(q, k, v):
        return _Attended.apply(q, k, v, mask, cp, is_causal)
    return _AttendedAgain.apply(q, k, v, mask)


def _takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether there is a flash kernel (passes.ops.flash)."""
    alike = all(t.dim() == 4 and t.dtype == q.dtype and t.stride(-1) == 1 for t in (q, k, v))
    return alike and q.shape[3] == k.shape[3] == v.shape[3] and q.dtype.is_floating_point


class _Attended(torch.autograd.Function):
    """``cp``: of how many ranks keys and values are gathered; 1: none are. A causal result is joined from two chunks in
    memory [b, s, h, d]; any other is the kernel's, with the strides of q."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cp: int, is_causal: bool) -> Tensor:
        ctx.cp = cp
        whole = _wholes((k, v), 2, cp) if cp > 1 else []
        batch, heads, rows, _ = q.shape
        out = q.new_empty((batch, rows, heads, v.shape[3])).transpose(1, 2) if is_causal else torch.empty_like(q)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        ctx.save_for_backward(q, k, v, mask, out, q.new_empty((batch, heads, rows), dtype=wide))
        del whole
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, *_ = ctx.saved_tensors
        if ctx.cp > 1:
            k, v = _wholes((k, v), 2, ctx.cp)
        totals = [torch.zeros_like(t) for t in (q, k, v)]
        addends = [torch.empty_like(t) for t in (q, k, v)]
        del addends
        own = _owns(totals[1:], 2, ctx.cp) if ctx.cp > 1 else totals[1:]
        return totals[0], *own, None, None, None


class _AttendedAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, k, v, mask)
        return q.new_empty((*q.shape[:3], v.shape[3]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, _ = ctx.saved_tensors
        return (*(torch.empty_like(t) for t in (q, k, v)), None)


OF_SEQUENCE: dict[Any, Any] = {
    sequence.local_rows: local_rows,
    sequence.gather_sequence: gather_sequence,
    sequence.sum_over_ranks: lambda x, cp: summed(x),
    sequence.causal_attention: causal_attention,
    sequence.gathered_attention: gathered_attention,
}
