"""Flash attention as ATen has it for each device, forward and backward: merging results of ranks needs its log-sum-exp.

CPU     float64, float32, bfloat16, float16; fewer key heads than query heads; masks
CUDA    bfloat16, float16; heads of a multiple of 8 up to 256 features
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_MOST_FEATURES = 256


class Result(NamedTuple):
    """``out`` [b, h, s, d]; ``lse`` [b, h, s]: log of the sum of a row's exponentials, float32 for half precision."""

    out: Tensor
    lse: Tensor


def takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> bool:
    """Whether a kernel is there for these operands."""
    if any(t.dim() != 4 or t.dtype != q.dtype or t.stride(-1) != 1 for t in (q, k, v)):
        return False
    if not q.shape[0] == k.shape[0] == v.shape[0] or not q.shape[3] == k.shape[3] == v.shape[3]:
        return False
    if q.is_cuda:
        return mask is None and q.dtype in _HALF and q.shape[3] % 8 == 0 and q.shape[3] <= _MOST_FEATURES
    return q.device.type == "cpu" and q.dtype.is_floating_point


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Result:
    """Attention of all rows to all keys; ``is_causal``: of a square, to those up to its own."""
    if q.is_cuda:
        found: Any = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, is_causal, scale=scale)
        return Result(found[0], found[1])
    given: dict[str, Any] = {"attn_mask": _added(mask, q), "scale": scale}
    return Result(*aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, is_causal, **given))


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
    given = (grad, q, k, v, out, lse.contiguous())
    if not q.is_cuda:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return backward(*given, 0.0, is_causal, attn_mask=_added(mask, q), scale=scale)
    backward = aten._scaled_dot_product_flash_attention_backward.default
    no_draws = torch.empty(2, dtype=torch.uint64, device=q.device)
    return backward(*given, None, None, q.shape[2], k.shape[2], 0.0, is_causal, no_draws, no_draws, scale=scale)


def _added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The addend of scores, of two or four dims: −∞ for a key that a boolean mask hides."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    return mask if mask.dim() in (2, 4) else mask[(None,) * (4 - mask.dim())]
