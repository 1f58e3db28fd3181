"""Attention of one rank's heads and tokens.

Of tp, with fewer key heads than ranks: each rank picks the key heads that its query heads read. Of cp, causal: tokens
attend to all tokens before them, without a mask of s × s; if no kernel takes the operands, or with dropout, each of a
rank's chunks is plain attention with a mask of its rows and the keys that they may see.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.documents import MaskRows, attention_by_documents
from passes.ops.flash import FLASH
from passes.ops.gathered_attention import attend_in_parts, is_in_parts, masked_causal_attention


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
    documents: int = 0,
    rows: MaskRows | None = None,
    inputs: Sequence[Tensor] = (),
) -> Tensor:
    """q [b, h/tp, s, d] of this rank, k and v [b, g, t, d] replicated: attention of its query heads (type V over
    heads). ``documents``: if not 0, as of ``attention_by_documents``, with ``rows`` and ``inputs``.
    """
    k, v = key_heads_of(q, k, v, axis)
    gqa = k.shape[1] != q.shape[1]
    if documents and mask is not None:
        return attention_by_documents(q, k, v, mask, documents, scale, gqa, rows, inputs)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=gqa)


def key_heads_of(q: Tensor, k: Tensor, v: Tensor, axis: AxisHandle) -> tuple[Tensor, Tensor]:
    """Return of all heads of k and v those that this rank's heads of q read."""
    local, per_group = q.shape[1], q.shape[1] * axis.size // k.shape[1]
    heads = [head // per_group for head in range(axis.rank * local, (axis.rank + 1) * local)]
    return _read_by(heads, k), _read_by(heads, v)


def _read_by(heads: list[int], x: Tensor) -> Tensor:
    """The key heads ``heads``: a part of x if equally many query heads read each, else one for each query head."""
    first, count = heads[0], heads[-1] - heads[0] + 1
    if heads == [first + i // (len(heads) // count) for i in range(len(heads))]:
        return x.narrow(1, first, count)
    return torch.cat([x.narrow(1, head, 1) for head in heads], 1)


def attention_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an ``aten.scaled_dot_product_attention`` call after q, k, v, by name."""
    names = ("mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = dict(zip(names, args[3:], strict=False))
    return given | {("mask" if k == "attn_mask" else k): value for k, value in kwargs.items()}


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
    return masked_causal_attention(q, k, v, axis, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)


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
    """Return the same with fewer key heads than ranks of ``tp``: q of this rank's heads, k and v of all."""
    k, v = key_heads_of(q, k, v, tp)
    return causal_attention(q, k, v, axis, dropout_p, scale, k.shape[1] != q.shape[1], kernel)
