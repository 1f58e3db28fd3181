"""Attention where there are fewer key heads than ranks: each rank picks the key heads that its query heads read."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from passes.ops.axis import AxisHandle

Tensor = torch.Tensor


def shared_key_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: AxisHandle,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """q [b, h/tp, s, d] of this rank, k and v [b, g, t, d] whole: attention of its query heads (type V over heads)."""
    local, groups = q.shape[1], k.shape[1]
    per_group = local * axis.size // groups
    first = axis.rank * local
    index = torch.div(torch.arange(first, first + local, device=q.device), per_group, rounding_mode="floor")
    return F.scaled_dot_product_attention(
        q,
        k.index_select(1, index),
        v.index_select(1, index),
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
    )


def attention_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options of an ``aten.scaled_dot_product_attention`` call after q, k, v, by name."""
    names = ("mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, args[3:], strict=False))
    return given | {("mask" if k == "attn_mask" else k): value for k, value in kwargs.items()}
