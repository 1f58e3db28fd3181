"""Attention within documents: of a mask that keeps them apart, the blocks alone (passes.ops.document_blocks).

The blocks are read off the values of the mask, once for all attentions of a microbatch that share it, so the result is
that of the whole mask, whatever it is: a mask of another form, or of so many small blocks that calls would cost more
than they save, is applied itself. A GPU computes all blocks in one call, or applies the mask: calls of many
sizes took seven times as long there as the mask of all (benchmarks/RESULTS.md, "On a GPU").

A mask that is made of smaller tensors, as of the numbers of documents, is never whole: ``runs_of_rows`` computes some
of its rows at a time, and keeps the first and the last key of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from passes.ops.document_blocks import (
    CAUSAL,
    WHOLE,
    KeyBlock,
    Segments,
    attention_of_segments,
    blocks_of,
    has_kernel,
    runs_of,
    segments_of,
)
from passes.ops.flash import FLASH, AttentionCall, AttentionPart, Result, attended, attended_backward, takes

CALL = 1 << 15  # scores of all heads that could be computed in the time that a call takes
TILE = 1 << 22  # elements of a mask that are computed at a time


class MaskRows:
    """A mask of ``shape`` [.., s, t], some of its rows at a time: ``module(*inputs)`` gives it as a tuple of one.

    ``is_cut``: of each input, whether its dim -2 has the rows of the mask.
    """

    def __init__(self, module: Callable[..., Any], is_cut: Sequence[bool], shape: Sequence[int]) -> None:
        self.module, self.is_cut, self.shape = module, tuple(is_cut), tuple(shape)

    def at(self, inputs: Sequence[Tensor], rows: slice) -> Tensor:
        given = (x[..., rows, :] if is_cut else x for x, is_cut in zip(inputs, self.is_cut, strict=True))
        (found,) = self.module(*given)
        return found.expand(*self.shape[:-2], rows.stop - rows.start, self.shape[-1])

    @property
    def whole(self) -> slice:
        return slice(0, self.shape[-2])

    def tiles(self) -> Iterator[slice]:
        step = max(1, TILE * self.shape[-2] // prod(self.shape))
        for first in range(0, self.shape[-2], step):
            yield slice(first, min(first + step, self.shape[-2]))

    def __repr__(self) -> str:
        return f"mask_{'x'.join(map(str, self.shape))}"


def runs_of_rows(mask: MaskRows, inputs: Sequence[Tensor]) -> Tensor:
    """Return [sequences, s, 3] int64: as ``runs_of`` the mask."""
    if any(not _has_values(x) for x in inputs):
        sequences = mask.shape[0] if len(mask.shape) == 4 else 1
        return inputs[0].new_empty((sequences, mask.shape[-2], 3), dtype=torch.int64)
    return torch.cat([runs_of(mask.at(inputs, rows)) for rows in mask.tiles()], 1)


class Masked(NamedTuple):
    """A mask: ``tensor`` itself, or ``rows`` of ``inputs`` and, as ``tensor``, its runs; of ``sequences``."""

    tensor: Tensor
    rows: MaskRows | None
    inputs: Sequence[Tensor]
    sequences: slice = slice(None)

    @property
    def whole(self) -> Tensor:
        return self.tensor if self.rows is None else self.rows.at(self.inputs, self.rows.whole)

    def of(self, sequences: slice) -> Masked:
        return self._replace(sequences=sequences)

    def at(self, rows: slice, keys: slice) -> Tensor:
        found = self.tensor[..., rows, :] if self.rows is None else self.rows.at(self.inputs, rows)
        return (found if found.dim() < 4 or found.shape[0] == 1 else found[self.sequences])[..., keys]


class Known:
    """What is known of a mask while it lives: its blocks, and their segments for each number of sequences and keys."""

    def __init__(self, mask: Masked) -> None:
        self.blocks = tuple(blocks_of(runs_of(mask.tensor) if mask.rows is None else mask.tensor))
        self.device = mask.tensor.device
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
    rows: MaskRows | None = None,
    inputs: Sequence[Tensor] = (),
) -> Tensor:
    """q [b, h, s, d], k and v [b, g, t, d], mask [.., s, t] → [b, h, s, d]: as scaled_dot_product_attention.

    ``documents``: tokens of one, on average, for operands without values. ``rows``, ``inputs``: the mask, if ``mask``
    has its runs.
    """
    masked, options = Masked(mask, rows, inputs), {"scale": scale, "enable_gqa": enable_gqa}
    if not _has_values(mask):
        return _in_calls(q, k, v, masked, list(_expected(q.shape[2], k.shape[2], documents)), options)
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():  # a graph reads no values
        return F.scaled_dot_product_attention(q, k, v, masked.whole, **options)
    known = _known(masked)
    if has_kernel(q, k, v) and (segments := known.segments(q.shape[0], k.shape[2])):
        return attention_of_segments(q, k, v, segments, scale)
    blocks = known.blocks
    if not blocks and rows is not None:
        blocks = (KeyBlock(-1, 0, q.shape[2], 0, k.shape[2], None),)
    if _are_worth_calls(blocks, q, k) or (rows is not None and q.shape[2] * k.shape[2] > TILE and not q.is_cuda):
        return _in_calls(q, k, v, masked, blocks, options)
    return F.scaled_dot_product_attention(q, k, v, masked.whole, **options)


def _has_values(x: Tensor) -> bool:
    return type(x) is Tensor and not x.is_meta


def _known(mask: Masked) -> Known:
    known = _KNOWN.get(mask.tensor)
    if known is None:
        known = _KNOWN[mask.tensor] = Known(mask)
    return known


def _are_worth_calls(blocks: Sequence[KeyBlock], q: Tensor, k: Tensor) -> bool:
    if q.is_cuda:
        return False
    sequences = q.shape[0] if blocks and blocks[0].sequence < 0 else 1
    spent = sum(sequences * q.shape[1] * b.rows * b.num_keys + CALL for b in blocks)
    return bool(blocks) and spent < q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]


def _in_calls(
    q: Tensor, k: Tensor, v: Tensor, mask: Masked, blocks: Sequence[KeyBlock], options: dict[str, Any]
) -> Tensor:
    found = []
    for sequence, of_sequence in groupby(blocks, lambda block: block.sequence):
        here = slice(None) if sequence < 0 else slice(sequence, sequence + 1)
        operands = (q[here], k[here], v[here])
        found.append(torch.cat([_attended(block, operands, mask.of(here), options) for block in of_sequence], 2))
    return torch.cat(found) if len(found) > 1 else found[0]


def _attended(
    block: KeyBlock, operands: tuple[Tensor, Tensor, Tensor], mask: Masked, options: dict[str, Any]
) -> Tensor:
    (q, k, v), rows, keys = operands, slice(block.first, block.stop), slice(block.keys, block.end)
    given = q[:, :, rows], k[:, :, keys], v[:, :, keys]
    if block.band == WHOLE or (block.band == CAUSAL and block.is_square):
        return F.scaled_dot_product_attention(*given, is_causal=block.band == CAUSAL, **options)
    if block.band == CAUSAL and takes(*given):
        return _Suffix.apply(*given, options["scale"])
    found = []
    for rows, keys in block.tiles(max(1, TILE // block.num_keys)):
        seen = mask.at(rows, keys) if block.band is None else block.mask(rows, keys, q.device)
        found.append(F.scaled_dot_product_attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], seen, **options))
    return torch.cat(found, 2) if len(found) > 1 else found[0]


class _Suffix(torch.autograd.Function):
    """Causal attention of a document's last tokens: to all keys before them, and to their own, merged."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Any:
        every, before = slice(None), k.shape[2] - q.shape[2]
        ctx.scale = scale
        ctx.chunks = [[AttentionPart(every, slice(0, before)), AttentionPart(every, slice(before, None), True)]]
        result = attended(AttentionCall(q, k, v, None, True, scale), FLASH, ctx.chunks)
        ctx.save_for_backward(q, k, v, *result)
        return result.out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, *result = ctx.saved_tensors
        call = AttentionCall(q, k, v, None, True, ctx.scale)
        return *attended_backward(grads[0], call, Result(*result), FLASH, ctx.chunks), None


def _expected(rows: int, keys: int, documents: int) -> Iterator[KeyBlock]:
    """Yield equal documents: the first of its rows reads the first of its keys."""
    size = min(documents, rows)
    for first in range(0, rows, size):
        stop = min(first + size, rows)
        is_square = rows == keys
        of_keys = (first, stop) if is_square else (0, min(keys, documents))
        yield KeyBlock(-1, first, stop, *of_keys, CAUSAL if is_square else WHOLE)
