"""Attention within documents: a mask that lets each token read a run of keys, block by block, without the rest.

    mask                       blocks
    1 . . . . .                rows 0 to 3 × keys 0 to 3, causal
    1 1 . . . .                rows 4 to 5 × keys 4 to 5, causal
    1 1 1 . . .
    1 1 1 1 . .                a block ends where a row reads none of the keys of the row before it
    . . . . 1 .
    . . . . 1 1

The blocks are read off the values of the mask, once for all attentions of a microbatch that share it, so the result is
that of the whole mask, whatever it is: a mask of another form, or of so many small blocks that calls would cost more
than they save, is applied in one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

CAUSAL, WHOLE, MASKED = "causal", "whole", "masked"
CALL = 1 << 15  # scores of all heads that could be computed in the time that a call takes


class Block(NamedTuple):
    """Rows ``first`` to ``stop`` of sequence ``sequence`` (-1: of every one) read ``keys`` to ``end``."""

    sequence: int
    first: int
    stop: int
    keys: int
    end: int
    kind: str


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
    blocks = _blocks(q, k, mask, documents)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if blocks is None:
        return F.scaled_dot_product_attention(q, k, v, mask, **options)
    found = []
    for sequence, of_sequence in groupby(blocks, lambda block: block.sequence):
        here = slice(None) if sequence < 0 else slice(sequence, sequence + 1)
        operands = q[here], k[here], v[here], mask if mask.dim() < 4 or mask.shape[0] == 1 else mask[here]
        found.append(torch.cat([_attended(block, *operands, options) for block in of_sequence], 2))
    return torch.cat(found) if len(found) > 1 else found[0]


def _attended(block: Block, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    rows, keys = slice(block.first, block.stop), slice(block.keys, block.end)
    given: dict[str, Any] = {"is_causal": block.kind == CAUSAL, **options}
    if block.kind == MASKED:
        given["attn_mask"] = mask[..., rows, keys]
    return F.scaled_dot_product_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], **given)


def _blocks(q: Tensor, k: Tensor, mask: Tensor, documents: int) -> Sequence[Block] | None:
    if type(mask) is not Tensor or mask.is_meta:
        return list(_expected(q.shape[2], k.shape[2], documents))
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # a graph reads no values
    blocks = _KNOWN.get(mask)
    if blocks is None:
        blocks = _KNOWN[mask] = tuple(blocks_of(mask))
    sequences = q.shape[0] if blocks and blocks[0].sequence < 0 else 1
    spent = sum(sequences * q.shape[1] * (b.stop - b.first) * (b.end - b.keys) + CALL for b in blocks)
    return blocks if blocks and spent < q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] else None


_KNOWN: Any = WeakIdKeyDictionary()  # mask → its blocks, while it lives


def _expected(rows: int, keys: int, documents: int) -> Iterator[Block]:
    """Equal documents: the first of its rows reads the first of its keys."""
    size = min(documents, rows)
    for first in range(0, rows, size):
        stop = min(first + size, rows)
        is_square = rows == keys
        of_keys = (first, stop) if is_square else (0, min(keys, documents))
        yield Block(-1, first, stop, *of_keys, CAUSAL if is_square else WHOLE)


def blocks_of(mask: Tensor) -> list[Block]:
    """Of a mask [.., s, t] that all heads share, booleans or addends; [] if its blocks do not say all of it."""
    seen = _seen(mask)
    if seen is None:
        return []
    count, size = seen.sum(-1), seen.shape[-1]
    first = seen.to(torch.uint8).argmax(-1)
    last = size - 1 - seen.flip(-1).to(torch.uint8).argmax(-1)
    if bool((count == 0).any()):
        return []  # what a row without keys becomes depends on the kind of mask
    is_run = count == last - first + 1
    begins = torch.ones_like(first, dtype=torch.bool)
    begins[:, 1:] = (first[:, 1:] > last[:, :-1]) | (first[:, :-1] > last[:, 1:])
    per_row = torch.stack([begins.long(), first, last, is_run.long()], -1).tolist()
    alone = len(per_row) == 1
    return [b for number, rows in enumerate(per_row) for b in _of_sequence(-1 if alone else number, rows)]


def _seen(mask: Tensor) -> Tensor | None:
    """[sequences, s, t]: which keys a row reads; None if heads differ, or addends do more than that."""
    if mask.dim() == 4 and mask.shape[1] == 1:
        mask = mask[:, 0]
    elif mask.dim() == 2:
        mask = mask[None]
    else:
        return None
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    return seen if bool((seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()) else None


def _of_sequence(number: int, rows: list[list[int]]) -> Iterator[Block]:
    """``rows``: of each whether a block begins with it, its first and last key, and whether it reads all between."""
    starts = [i for i, (begins, *_) in enumerate(rows) if begins]
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        here = rows[start:stop]
        keys, end = min(row[1] for row in here), max(row[2] for row in here) + 1
        yield Block(number, start, stop, keys, end, _kind(here, keys, end))


def _kind(rows: list[list[int]], keys: int, end: int) -> str:
    if not all(first == keys and is_run for _, first, _, is_run in rows):
        return MASKED
    if all(last == end - 1 for _, _, last, _ in rows):
        return WHOLE
    is_square = len(rows) == end - keys
    return CAUSAL if is_square and all(last == keys + i for i, (_, _, last, _) in enumerate(rows)) else MASKED
