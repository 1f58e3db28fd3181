"""Attention of one cp rank's tokens, by kernels that return log-sum-exps or not, to keys of all ranks.

Causal, in parts, each without a mask:

    chunk c      keys before the chunk: all of them;  its own keys: causal, a square
    merged       lse = log(e^lse₁ + e^lse₂),  y = y₁ e^(lse₁ − lse) + y₂ e^(lse₂ − lse)

The backward of each part with the merged y and lse is its addend to the gradient (Dao 2023, FlashAttention-2; Liu et
al. 2023, ring attention).

``gathered_attention`` gets this rank's keys and values, gathers both in one exchange, and again in the backward: no
rank saves those of the full sequence. Their gradients are summed over the ranks in one exchange too, in their own
dtype. Without a kernel that returns log-sum-exps, the backward recomputes attention, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.ops.axis import AxisHandle, widened
from passes.ops.context import gathered_together, scattered_sums
from passes.ops.cudnn import cudnn, cudnn_backward
from passes.ops.documents import MaskRows, attention_by_documents
from passes.ops.flash import Result, flash, flash_backward, merged, takes
from passes.partition.sequence import zigzag

FLASH, CUDNN = "flash", "cudnn"
KERNELS: dict[str, Any] = {FLASH: (flash, flash_backward), CUDNN: (cudnn, cudnn_backward)}  # forward, backward


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    axis: AxisHandle,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    documents: int = 0,
    kernel: str = FLASH,
    rows: MaskRows | None = None,
    inputs: Sequence[Tensor] = (),
) -> Tensor:
    """q [b, h, s/cp, d], k and v [b, g, t/cp, d] of this rank → [b, h, s/cp, d]; ``mask`` [.., s/cp, t], no gradient.

    ``is_causal``: there is no mask, and s = t. ``documents``: if not 0, as of ``attention_by_documents``, with
    ``rows`` and ``inputs``. ``kernel``: one of ``KERNELS``; flash where it takes the operands, cuDNN always.
    """
    function = _InParts if is_in_parts(q, k, v, mask, kernel) and not documents else _Again
    return function.apply(q, k, v, mask, axis, scale, is_causal, True, enable_gqa, documents, kernel, rows, inputs)


def is_in_parts(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: str) -> bool:
    return kernel == CUDNN or takes(q, k, v, mask)


def attend_in_parts(q: Tensor, k: Tensor, v: Tensor, axis: AxisHandle, scale: float | None, kernel: str) -> Tensor:
    """Causal attention, by one of ``KERNELS``, to keys and values that are gathered: k and v [b, g, s, d]."""
    return _InParts.apply(q, k, v, None, axis, scale, True, False, False, 0, kernel, None, ())


def masked_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, axis: AxisHandle, dropout_p: float, scale: float | None, enable_gqa: bool
) -> Tensor:
    """The same by plain attention: a mask for each chunk, of its rows and the keys that they may see."""
    found = []
    for rows, (start, end) in zip(q.chunk(2, 2), zigzag.rows(k.shape[2], axis.size, axis.rank), strict=True):
        keys = torch.arange(end, device=q.device)
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        operands = (rows, k.narrow(2, 0, end), v.narrow(2, 0, end), keys[start:].view(-1, 1) >= keys)
        found.append(F.scaled_dot_product_attention(*operands, **options))
    return torch.cat(found, 2)


class Part(NamedTuple):
    """Rows ``rows`` of a rank's queries against ``keys`` of the full sequence."""

    rows: slice
    keys: slice
    is_causal: bool = False

    def of_rows(self, x: Tensor) -> Tensor:
        return x[:, :, self.rows]

    def of_keys(self, x: Tensor) -> Tensor:
        return x[:, :, self.keys]


def parts_of(size: int, axis: AxisHandle, is_causal: bool) -> Iterator[list[Part]]:
    """For each of a rank's two chunks its parts; without causal, one part of all. ``size``: keys of all ranks."""
    if not is_causal:
        yield [Part(slice(None), slice(None))]
        return
    first = 0
    for start, end in zigzag.rows(size, axis.size, axis.rank):
        rows = slice(first, first + end - start)
        own = Part(rows, slice(start, end), True)
        yield [Part(rows, slice(0, start)), own] if start else [own]
        first = rows.stop


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, axis: AxisHandle, *options: Any) -> Any:
        ctx.axis = axis
        ctx.scale, ctx.is_causal, ctx.gathers, _, _, kernel, *_ = options
        forward, ctx.of_kernel = KERNELS[kernel]
        whole_k, whole_v = gathered_together((k, v), 2, axis, "forward") if ctx.gathers else (k, v)
        found = []
        for parts in parts_of(whole_k.shape[2], axis, ctx.is_causal):
            operands = ((p.of_rows(q), p.of_keys(whole_k), p.of_keys(whole_v), mask, p.is_causal) for p in parts)
            found.append(merged([forward(*given, ctx.scale) for given in operands]))
        out, lse = _joined(found)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, mask, out, lse = ctx.saved_tensors
        if ctx.gathers:
            k, v = gathered_together((k, v), 2, ctx.axis, "backward")
        of_q, of_k, of_v = torch.zeros_like(widened(q)), torch.zeros_like(widened(k)), torch.zeros_like(widened(v))
        for part in (part for parts in parts_of(k.shape[2], ctx.axis, ctx.is_causal) for part in parts):
            rows, keys = part.of_rows, part.of_keys
            given = (rows(grads[0]), rows(q), rows(out), rows(lse), keys(k), keys(v), mask)
            addends = ctx.of_kernel(*given, part.is_causal, ctx.scale)
            for total, addend in zip((rows(of_q), keys(of_k), keys(of_v)), addends, strict=True):
                total += addend
        of_q, of_k, of_v = of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)
        if ctx.gathers:
            of_k, of_v = scattered_sums((of_k, of_v), 2, ctx.axis, "backward")
        return of_q, of_k, of_v, *[None] * 10


class _Again(torch.autograd.Function):
    """Attention with a backward that repeats the gather and the attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, axis: AxisHandle, *options: Any) -> Any:
        ctx.axis, ctx.options = axis, options
        ctx.save_for_backward(q, k, v, mask)
        whole_k, whole_v = gathered_together((k, v), 2, axis, "forward")
        return _plain(q, whole_k, whole_v, mask, axis, *options)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, mask = ctx.saved_tensors
        leaves = [q.detach(), *gathered_together((k, v), 2, ctx.axis, "backward")]
        leaves = [t.detach().requires_grad_() for t in leaves]
        with torch.enable_grad():
            out = _plain(leaves[0], leaves[1], leaves[2], mask, ctx.axis, *ctx.options)
        of_q, *others = torch.autograd.grad(out, leaves, grads[0])
        of_k, of_v = scattered_sums(others, 2, ctx.axis, "backward")
        return of_q, of_k, of_v, *[None] * 10


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, axis: AxisHandle, *options: Any) -> Tensor:
    scale, is_causal, _, gqa, documents, _, rows, inputs = options
    if is_causal:
        return masked_causal_attention(q, k, v, axis, 0.0, scale, gqa)
    if documents and mask is not None:
        return attention_by_documents(q, k, v, mask, documents, scale, gqa, rows, inputs)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=gqa)


def _joined(chunks: list[Result]) -> Result:
    """The rows of all chunks, in memory [b, s, h, d]: whoever brings the heads of a token together copies nothing."""
    if len(chunks) == 1:
        return chunks[0]
    rows = torch.cat([chunk.out.transpose(1, 2) for chunk in chunks], 1)
    return Result(rows.transpose(1, 2), torch.cat([chunk.lse for chunk in chunks], 2))
