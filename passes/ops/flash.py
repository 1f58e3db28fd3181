"""Attention by kernels that return log-sum-exps, forward and backward: to merge results of several parts of the keys.

flash, CPU     float64, float32, bfloat16, float16; fewer key heads than query heads; masks
flash, CUDA    bfloat16, float16; heads of up to 256 features
cuDNN          which calls it takes depends on the GPU, on the versions of cuDNN and torch, and on every size: torch is
               asked, before the first step. Queries and values may differ in width, and there may be fewer key heads

ATen's flash kernels take queries, keys and values of one width. Narrower ones get features of zero, which change no
score and no other feature of the result; on CUDA the width is a multiple of 8.

    merged       lse = log(e^lse₁ + e^lse₂),  y = y₁ e^(lse₁ − lse) + y₂ e^(lse₂ − lse)

The backward of each part with the merged y and lse is its addend to the gradient (Dao 2023, FlashAttention-2; Liu et
al. 2023, ring attention).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda

from passes.ops.axis import widened
from passes.program.ops.aten import HALF, aten

MOST_FEATURES, _STEP = 256, 8  # on CUDA


class AttentionCall(NamedTuple):
    """q [b, h, s, d], k and v [b, g, t, d]: all rows attend to all keys; ``is_causal``: of a square, to those up to
    their own. ``scale``: None for that of the model's own width."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None


class Result(NamedTuple):
    """``out`` [b, h, s, d]; ``lse`` [b, h, s]: log of the sum of a row's exponentials, float32 for half precision."""

    out: Tensor
    lse: Tensor


class AttentionPart(NamedTuple):
    """Rows ``rows`` of the queries against ``keys``."""

    rows: slice
    keys: slice
    is_causal: bool = False

    def of(self, call: AttentionCall) -> AttentionCall:
        k, v = call.k[:, :, self.keys], call.v[:, :, self.keys]
        return call._replace(q=call.q[:, :, self.rows], k=k, v=v, is_causal=self.is_causal)


def attended(call: AttentionCall, kernel: str, chunks: Sequence[Sequence[AttentionPart]]) -> Result:
    """Return the rows of each chunk, one after the other; of each the parts of the keys that it reads."""
    forward, _ = KERNELS[kernel]
    found = [merged([forward(part.of(call)) for part in parts]) for parts in chunks]
    if len(found) == 1:
        return found[0]
    # in memory [b, s, h, d]: whoever brings the heads of a token together copies nothing
    rows = torch.cat([chunk.out.transpose(1, 2) for chunk in found], 1)
    return Result(rows.transpose(1, 2), torch.cat([chunk.lse for chunk in found], 2))


def attended_backward(
    grad: Tensor, call: AttentionCall, result: Result, kernel: str, chunks: Sequence[Sequence[AttentionPart]]
) -> list[Tensor]:
    """Return the gradients of q, k and v; parts are added up in no less than float32."""
    _, backward = KERNELS[kernel]
    totals = [torch.zeros_like(widened(x)) for x in call[:3]]
    for part in (part for parts in chunks for part in parts):
        of_part = Result(*(x[:, :, part.rows] for x in result))
        addends = backward(grad[:, :, part.rows], part.of(call), of_part)
        for total, at, addend in zip(totals, (part.rows, part.keys, part.keys), addends, strict=True):
            total[:, :, at] += addend
    return [total.to(x.dtype) for total, x in zip(totals, call[:3], strict=True)]


def merged(parts: list[Result]) -> Result:
    """Merge attention to each part of the keys into that to all of them; sums in no less than float32."""
    (out, lse), *rest = parts
    dtype = out.dtype
    for other, other_lse in rest:
        total = torch.logaddexp(lse, other_lse)
        out = out * (lse - total).exp().unsqueeze(-1) + other * (other_lse - total).exp().unsqueeze(-1)
        lse = total
    return Result(out.to(dtype), lse)


def takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> bool:
    """Return whether a kernel is there for these operands."""
    if any(t.dim() != 4 or t.dtype != q.dtype or t.stride(-1) != 1 for t in (q, k, v)):
        return False
    if not q.shape[0] == k.shape[0] == v.shape[0] or q.shape[3] != k.shape[3]:
        return False
    if q.is_cuda:
        return mask is None and q.dtype in HALF and _width(q, v) <= MOST_FEATURES
    return q.device.type == "cpu" and q.dtype.is_floating_point


def flash(call: AttentionCall) -> Result:
    q, k, v, mask, is_causal, scale = call
    scale, features = _scale(q, scale), v.shape[3]
    q, k, v = _of_width(_width(q, v), q, k, v)
    if q.is_cuda:
        found: Any = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, is_causal, scale=scale)
        out, lse = found[0], found[1]
    else:
        given: dict[str, Any] = {"attn_mask": added(mask, q), "scale": scale}
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, is_causal, **given)
    return Result(out[..., :features], lse)


def flash_backward(grad: Tensor, call: AttentionCall, result: Result) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v. ``result`` may be of more keys than these: then they are their addends."""
    q, k, v, mask, is_causal, scale = call
    scale, shapes = _scale(q, scale), [t.shape[3] for t in (q, k, v)]
    grad, q, k, v, out = _of_width(_width(q, v), grad, q, k, v, result.out)
    given = (grad, q, k, v, out, result.lse.contiguous())
    if not q.is_cuda:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        found = backward(*given, 0.0, is_causal, attn_mask=added(mask, q), scale=scale)
    else:
        backward = aten._scaled_dot_product_flash_attention_backward.default
        no_draws = torch.empty(2, dtype=torch.uint64, device=q.device)
        sizes = q.shape[2], k.shape[2]
        found = backward(*given, None, None, *sizes, 0.0, is_causal, no_draws, no_draws, scale=scale)
    return tuple(t[..., :features] for t, features in zip(found, shapes, strict=True))


def cudnn_takes(call: AttentionCall) -> bool:
    """Return whether cuDNN takes a call with these operands, by torch."""
    q, k, v, mask, is_causal, _ = call
    is_shared = q.shape[1] != k.shape[1]
    return cuda.can_use_cudnn_attention(cuda.SDPAParams(q, k, v, added(mask, q), 0.0, is_causal, is_shared))


def cudnn(call: AttentionCall) -> Result:
    q, k, v, mask, is_causal, scale = call
    found = aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, added(mask, q), True, 0.0, is_causal, False, scale=scale
    )
    return Result(found[0], found[1].view(q.shape[:3]))  # it has a last dim of 1


def cudnn_backward(grad: Tensor, call: AttentionCall, result: Result) -> tuple[Tensor, ...]:
    """Return gradients: shares follow from ``lse``, and the mean of their gradients from ``out``."""
    q, k, v, mask, is_causal, scale = call
    no_draws = torch.empty((), dtype=torch.int64, device=q.device)
    sums, sizes = result.lse.contiguous().unsqueeze(-1), (q.shape[2], k.shape[2])
    given = (grad, q, k, v, result.out, sums, no_draws, no_draws, added(mask, q), None, None, *sizes, 0.0, is_causal)
    return aten._scaled_dot_product_cudnn_attention_backward.default(*given, scale=scale)


FLASH, CUDNN = "flash", "cudnn"
KERNELS: dict[str, Any] = {FLASH: (flash, flash_backward), CUDNN: (cudnn, cudnn_backward)}  # forward, backward


def added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the addend of scores, of two or four dims: −∞ for a key that a boolean mask hides."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    return mask if mask.dim() in (2, 4) else mask[(None,) * (4 - mask.dim())]


def _width(q: Tensor, v: Tensor) -> int:
    widest = max(q.shape[3], v.shape[3])
    return -(-widest // _STEP) * _STEP if q.is_cuda else widest


def _of_width(width: int, *tensors: Tensor) -> list[Tensor]:
    return [t if t.shape[3] == width else F.pad(t, (0, width - t.shape[3])) for t in tensors]


def _scale(q: Tensor, given: float | None) -> float:
    """Return the scale; by default that of the model's own width."""
    return q.shape[3] ** -0.5 if given is None else given
