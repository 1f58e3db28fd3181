"""Causal attention of one cp rank's tokens to all tokens before them, without a mask of s × s.

If no kernel takes the operands, or with dropout, each of a rank's chunks is plain attention with a mask
of its rows and the keys that they may see.
"""

from __future__ import annotations

from torch import Tensor

from passes.ops.attention import key_heads_of
from passes.ops.axis import AxisHandle
from passes.ops.gathered_attention import FLASH, attend_in_parts, is_in_parts, masked_causal_attention


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: AxisHandle,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel: str = FLASH,
) -> Tensor:
    """q [b, h, s/cp, d] of this rank, k and v [b, g, s, d] in the order of the sequence → [b, h, s/cp, d]."""
    if dropout_p == 0.0 and is_in_parts(q, k, v, None, kernel):
        return attend_in_parts(q, k, v, axis, scale, kernel)
    return masked_causal_attention(q, k, v, axis, dropout_p, scale, enable_gqa)


def shared_key_causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tp: AxisHandle,
    axis: AxisHandle,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel: str = FLASH,
) -> Tensor:
    """The same with fewer key heads than ranks of ``tp``: q of this rank's heads, k and v of all."""
    k, v = key_heads_of(q, k, v, tp)
    return causal_attention(q, k, v, axis, dropout_p, scale, k.shape[1] != q.shape[1], kernel)
