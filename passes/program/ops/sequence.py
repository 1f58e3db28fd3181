"""Placeholders for the collectives of a program over one cp rank's tokens, and of its loss. In one process only their
shapes are right.

    x = local_rows(x, dim, cp)                          [.., s, ..] → [.., s/cp, ..]        this rank's tokens
    x = gather_sequence(x, dim, cp)                     [.., s/cp, ..] → [.., s, ..]        all tokens, in their order
    x = sum_over_ranks(x, cp)                           as x         of partial sums; a pooled sequence, say
    y = causal_attention(q, k, v, cp)                   q, y [b, h, s/cp, d], k, v [b, g, s, d]
    y = gathered_attention(q, k, v, mask, cp)           q, y [b, h, s/cp, d], k, v [b, g, t/cp, d], mask [.., s/cp, t]
    x = over_data(x)                                    summed over all microbatches of the global batch

Zigzag: a sequence is 2·cp equal chunks, and rank r holds chunk r and behind it chunk 2·cp − 1 − r, so that causal
attention is as much work on every rank. Gathered tokens have the order of the full sequence. Backward:
``gather_sequence`` sums the gradients of all ranks and keeps this rank's (reduce-scatter); ``local_rows`` writes the
gradient to its places among zeros, and the ranks' gradients of the full value remain to be summed;
``sum_over_ranks`` is an all-reduce in both directions (its result's gradients are partial). ``gathered_attention``
gathers keys and values, and again in its backward, so that no rank saves those of all tokens.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def local_rows(x: Tensor, dim: int, cp: int) -> Tensor:
    """Return this rank's tokens of a value over all tokens."""
    return x.narrow(dim, 0, x.shape[dim] // cp).clone(memory_format=torch.contiguous_format)


def gather_sequence(x: Tensor, dim: int, cp: int) -> Tensor:
    """Return all ranks' tokens, in the order of the full sequence."""
    return torch.cat([x] * cp, dim)


def sum_over_ranks(x: Tensor, cp: int) -> Tensor:
    """Return the sum of all ranks' partial sums, on every rank."""
    return x * 1


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cp: int,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of this rank's tokens to all that stand before them, and to themselves; no mask is made."""
    return scaled_dot_product_attention(q, k, v, None, dropout_p, scale=scale, enable_gqa=enable_gqa)


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
    """Attention of this rank's tokens to those of all ranks; k and v are this rank's."""
    k, v = gather_sequence(k, 2, cp), gather_sequence(v, 2, cp)
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)


def over_data(share: Tensor) -> Tensor:
    """Return Σ of the shares of all microbatches, as are their gradients; the value, if run in one process."""
    return share


CALLS = frozenset({local_rows, gather_sequence, sum_over_ranks, causal_attention, gathered_attention})
