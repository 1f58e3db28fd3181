"""Attention by cuDNN, forward and backward, with log-sum-exps as passes.ops.flash has them.

Which calls it takes depends on the GPU, on the versions of cuDNN and torch, and on every size: torch is asked, before
the first step (runtime.attention). Queries and values may differ in width, and there may be fewer key heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.backends import cuda

from passes.ops.flash import Result, added

aten = torch.ops.aten


def takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether cuDNN takes a call with these operands, by torch."""
    is_shared = q.shape[1] != k.shape[1]
    return cuda.can_use_cudnn_attention(cuda.SDPAParams(q, k, v, added(mask, q), 0.0, is_causal, is_shared))


def cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Result:
    """As ``flash``."""
    found = aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, added(mask, q), True, 0.0, is_causal, False, scale=scale
    )
    return Result(found[0], found[1].view(q.shape[:3]))  # it has a last dim of 1


def cudnn_backward(
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
    """As ``flash_backward``: shares follow from ``lse``, and the mean of their gradients from ``out``."""
    no_draws = torch.empty((), dtype=torch.int64, device=q.device)
    sums, sizes = lse.contiguous().unsqueeze(-1), (q.shape[2], k.shape[2])
    given = (grad, q, k, v, out, sums, no_draws, no_draws, added(mask, q), None, None, *sizes, 0.0, is_causal)
    return aten._scaled_dot_product_cudnn_attention_backward.default(*given, scale=scale)
