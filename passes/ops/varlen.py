"""All documents of a microbatch in one call of a GPU's kernel for segments of several lengths.

sequence 0 | sequence 1                  rows of all sequences, one after the other
a a a b b  | c c c c d                   segments: rows 0 3 5 9 10, and as many keys
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from passes.ops.document_blocks import Band, Block

_HALF = (torch.bfloat16, torch.float16)
_MOST_FEATURES = 256
_OLDEST = (8, 0)  # compute capability of the first GPUs with flash kernels


class Segments(NamedTuple):
    """Where each segment's ``rows`` and ``keys`` begin, int32 [n + 1]; ``places`` [keys] of those keys among
    all, None: all in their order. All have one band, aligned as flash kernels do: a last row stands at its last key.
    """

    rows: Tensor
    keys: Tensor
    most_rows: int
    most_keys: int
    places: Tensor | None
    band: Band


def has_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether this device has one for q, k and v [b, heads, s, d]."""
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) < _OLDEST:
        return False
    width = q.shape[3]
    alike = all(x.dtype == q.dtype and x.shape[3] == width for x in (k, v))
    return alike and q.dtype in _HALF and width % 8 == 0 and width <= _MOST_FEATURES


def segments_of(blocks: Sequence[Block], sequences: int, keys: int, device: torch.device) -> Segments | None:
    """``keys``: of one sequence. None where a block needs its mask, or no one band is that of all."""
    band = _band_of_all(blocks)
    if band is None:
        return None
    if blocks[0].sequence < 0:
        blocks = [block._replace(sequence=i) for i in range(sequences) for block in blocks]
    rows, of_keys = [b.rows for b in blocks], [b.num_keys for b in blocks]
    begins = [block.sequence * keys + block.keys for block in blocks]
    in_order = begins == [0, *accumulate(of_keys)][:-1] and sum(of_keys) == sequences * keys
    places = None if in_order else torch.cat([torch.arange(a, a + n) for a, n in zip(begins, of_keys, strict=True)])
    return Segments(
        _ends(rows, device),
        _ends(of_keys, device),
        max(rows),
        max(of_keys),
        None if places is None else places.to(device),
        band,
    )


def _band_of_all(blocks: Sequence[Block]) -> Band | None:
    bands = [block.band for block in blocks if block.band is not None]
    if not blocks or len(bands) < len(blocks):
        return None
    most = Band(*map(max, zip(*bands, strict=True)))
    return most if all(block.follows(most) for block in blocks) else None


def _ends(sizes: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32).to(device)


def attention_of_segments(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """q [b, h, s, d], k and v [b, g, t, d] → [b, h, s, d]."""
    rows, keys, values = (x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (q, k, v))
    if segments.places is not None:
        keys, values = keys[segments.places], values[segments.places]
    ends = (segments.rows, segments.keys, segments.most_rows, segments.most_keys)
    found = kernel(segments.band)(rows, keys, values, *ends, scale=scale)
    return found.view(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2)


@cache
def kernel(band: Band) -> Callable[..., Any]:
    """Newer versions of torch ask whether key heads may be fewer than query heads; older ones take it."""
    from torch.nn.attention.varlen import varlen_attn  # it takes a second, which a rank without a GPU need not wait

    options: dict[str, Any] = {"window_size": tuple(band)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    return partial(varlen_attn, **options)
