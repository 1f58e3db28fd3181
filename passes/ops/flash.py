"""Flash attention as ATen has it for each device, forward and backward: merging results of ranks needs its log-sum-exp.

CPU     float64, float32, bfloat16, float16; fewer key heads than query heads; masks
CUDA    bfloat16, float16; heads of up to 256 features

The kernels take queries, keys and values of one width. Narrower ones get features of zero, which change no score and
no other feature of the result; on CUDA the width is a multiple of 8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_MOST_FEATURES, _STEP = 256, 8  # on CUDA


class Result(NamedTuple):
    """``out`` [b, h, s, d]; ``lse`` [b, h, s]: log of the sum of a row's exponentials, float32 for half precision."""

    out: Tensor
    lse: Tensor


def takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> bool:
    """Whether a kernel is there for these operands."""
    if any(t.dim() != 4 or t.dtype != q.dtype or t.stride(-1) != 1 for t in (q, k, v)):
        return False
    if not q.shape[0] == k.shape[0] == v.shape[0] or q.shape[3] != k.shape[3]:
        return False
    if q.is_cuda:
        return mask is None and q.dtype in _HALF and _width(q, v) <= _MOST_FEATURES
    return q.device.type == "cpu" and q.dtype.is_floating_point


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Result:
    """Attention of all rows to all keys; ``is_causal``: of a square, to those up to its own."""
    scale, features = _scale(q, scale), v.shape[3]
    q, k, v = _of_width(_width(q, v), q, k, v)
    if q.is_cuda:
        found: Any = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, is_causal, scale=scale)
        out, lse = found[0], found[1]
    else:
        given: dict[str, Any] = {"attn_mask": added(mask, q), "scale": scale}
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, is_causal, **given)
    return Result(out[..., :features], lse)


def flash_backward(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. ``out`` and ``lse`` may be of more keys than these: then it is their addend."""
    scale, shapes = _scale(q, scale), [t.shape[3] for t in (q, k, v)]
    grad, q, k, v, out = _of_width(_width(q, v), grad, q, k, v, out)
    given = (grad, q, k, v, out, lse.contiguous())
    if not q.is_cuda:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        found = backward(*given, 0.0, is_causal, attn_mask=added(mask, q), scale=scale)
    else:
        backward = aten._scaled_dot_product_flash_attention_backward.default
        no_draws = torch.empty(2, dtype=torch.uint64, device=q.device)
        sizes = q.shape[2], k.shape[2]
        found = backward(*given, None, None, *sizes, 0.0, is_causal, no_draws, no_draws, scale=scale)
    of_q, of_k, of_v = (t[..., :features] for t, features in zip(found, shapes, strict=True))
    return of_q, of_k, of_v


def merged(parts: list[Result]) -> Result:
    """Attention to all keys, from that to each part of them; sums in no less than float32."""
    (out, lse), *rest = parts
    dtype = out.dtype
    for other, other_lse in rest:
        total = torch.logaddexp(lse, other_lse)
        out = out * (lse - total).exp().unsqueeze(-1) + other * (other_lse - total).exp().unsqueeze(-1)
        lse = total
    return Result(out.to(dtype), lse)


def added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The addend of scores, of two or four dims: −∞ for a key that a boolean mask hides."""
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
    """That of the model's own width."""
    return q.shape[3] ** -0.5 if given is None else given
