"""Attention within documents: of a mask that keeps them apart, the blocks alone (passes.ops.document_blocks).

The blocks are read off the values of the mask, once for all attentions of a microbatch that share it, so the result is
that of the whole mask, whatever it is: a mask of another form, or of so many small blocks that calls would cost more
than they save, is applied in one call. A GPU computes all blocks in one call (passes.ops.varlen), or applies the mask:
calls of many sizes took seven times as long there as the mask of all (benchmarks/RESULTS.md, "On a GPU").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from passes.ops.document_blocks import CAUSAL, WHOLE, Block, blocks_of
from passes.ops.varlen import Segments, attention_of_segments, has_kernel, segments_of

CALL = 1 << 15  # scores of all heads that could be computed in the time that a call takes


class Known:
    """What is known of a mask while it lives: its blocks, and their segments for each number of sequences and keys."""

    def __init__(self, mask: Tensor) -> None:
        self.blocks = tuple(blocks_of(mask))
        self.device = mask.device
        self._segments: dict[tuple[int, int], Segments | None] = {}

    def segments(self, sequences: int, keys: int) -> Segments | None:
        if (sequences, keys) not in self._segments:
            self._segments[sequences, keys] = segments_of(self.blocks, sequences, keys, self.device)
        return self._segments[sequences, keys]


_KNOWN: Any = WeakIdKeyDictionary()


def attention_by_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    documents: int,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """q [b, h, s, d], k and v [b, g, t, d], mask [.., s, t] → [b, h, s, d]: as scaled_dot_product_attention.

    ``documents``: tokens of one, on average, for operands without values.
    """
    if type(mask) is not Tensor or mask.is_meta:
        return _in_calls(q, k, v, mask, list(_expected(q.shape[2], k.shape[2], documents)), scale, enable_gqa)
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():  # a graph reads no values
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    known = _known(mask)
    if has_kernel(q, k, v) and (segments := known.segments(q.shape[0], k.shape[2])):
        return attention_of_segments(q, k, v, segments, scale)
    if _are_worth_calls(known.blocks, q, k):
        return _in_calls(q, k, v, mask, known.blocks, scale, enable_gqa)
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)


def _known(mask: Tensor) -> Known:
    known = _KNOWN.get(mask)
    if known is None:
        known = _KNOWN[mask] = Known(mask)
    return known


def _are_worth_calls(blocks: Sequence[Block], q: Tensor, k: Tensor) -> bool:
    if q.is_cuda:
        return False
    sequences = q.shape[0] if blocks and blocks[0].sequence < 0 else 1
    spent = sum(sequences * q.shape[1] * b.rows * b.num_keys + CALL for b in blocks)
    return bool(blocks) and spent < q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]


def _in_calls(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, blocks: Sequence[Block], scale: float | None, enable_gqa: bool
) -> Tensor:
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    found = []
    for sequence, of_sequence in groupby(blocks, lambda block: block.sequence):
        here = slice(None) if sequence < 0 else slice(sequence, sequence + 1)
        operands = q[here], k[here], v[here], mask if mask.dim() < 4 or mask.shape[0] == 1 else mask[here]
        found.append(torch.cat([_attended(block, *operands, options) for block in of_sequence], 2))
    return torch.cat(found) if len(found) > 1 else found[0]


def _attended(block: Block, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    rows, keys = slice(block.first, block.stop), slice(block.keys, block.end)
    given: dict[str, Any] = {"is_causal": block.band == CAUSAL and block.is_square, **options}
    if not given["is_causal"] and block.band != WHOLE:
        given["attn_mask"] = mask[..., rows, keys]
    return F.scaled_dot_product_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], **given)


def _expected(rows: int, keys: int, documents: int) -> Iterator[Block]:
    """Equal documents: the first of its rows reads the first of its keys."""
    size = min(documents, rows)
    for first in range(0, rows, size):
        stop = min(first + size, rows)
        is_square = rows == keys
        of_keys = (first, stop) if is_square else (0, min(keys, documents))
        yield Block(-1, first, stop, *of_keys, CAUSAL if is_square else WHOLE)
