"""The blocks of a mask that lets each token read a run of keys, read off its values.

mask                       blocks
1 . . . . .                rows 0 to 3 × keys 0 to 3, causal
1 1 . . . .                rows 4 to 5 × keys 4 to 5, causal
1 1 1 . . .
1 1 1 1 . .                a block ends where a row reads none of the keys of the row before it
. . . . 1 .
. . . . 1 1

A band: the last row stands at the last key, each row before it one key earlier, and reads some keys before and after.
All blocks of a microbatch are one call of a GPU's kernel for segments of several lengths:

sequence 0 | sequence 1                  rows of all sequences, one after the other
a a a b b  | c c c c d                   segments: rows 0 3 5 9 10, and as many keys
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from passes.ops.flash import MOST_FEATURES
from passes.program.ops.aten import HALF

_OLDEST = (8, 0)  # compute capability of the first GPUs with flash kernels


class Band(NamedTuple):
    """How many keys before and after the one where it stands a row reads; -1: all of its block's."""

    left: int
    right: int


CAUSAL, WHOLE = Band(-1, 0), Band(-1, -1)


class KeyBlock(NamedTuple):
    """Rows ``first`` to ``stop`` of sequence ``sequence`` (-1: of every one) read ``keys`` to ``end``.

    ``band`` is None where the rows of the block need the mask.
    """

    sequence: int
    first: int
    stop: int
    keys: int
    end: int
    band: Band | None

    @property
    def rows(self) -> int:
        return self.stop - self.first

    @property
    def num_keys(self) -> int:
        return self.end - self.keys

    @property
    def is_square(self) -> bool:
        return self.rows == self.num_keys

    def tiles(self, num_rows: int) -> Iterator[tuple[slice, slice]]:
        """Yield at most ``num_rows`` of its rows, and the keys that any of them may read."""
        left, right = self.band or WHOLE
        for first in range(self.first, self.stop, num_rows):
            stop = min(first + num_rows, self.stop)
            at, at_last = (self.end - self.stop + row for row in (first, stop - 1))
            keys = self.keys if left < 0 else max(self.keys, at - left)
            end = self.end if right < 0 else min(self.end, at_last + right + 1)
            yield slice(first, stop), slice(keys, end)

    def mask(self, rows: slice, keys: slice, device: torch.device) -> Tensor:
        """Return [rows, keys] of such a tile, by the band."""
        assert self.band is not None
        stands = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1) + self.end - self.stop
        key = torch.arange(keys.start, keys.stop, device=device)
        seen = torch.ones(len(stands), len(key), dtype=torch.bool, device=device)
        if self.band.left >= 0:
            seen &= key >= stands - self.band.left
        return seen & (key <= stands + self.band.right) if self.band.right >= 0 else seen

    def follows(self, band: Band) -> bool:
        """Return whether ``band``, which another block may have, says of this one what its own does."""
        assert self.band is not None
        most = Band(self.num_keys - 1, self.rows - 1)
        return all(o == b or (o < 0 and b >= m) for o, b, m in zip(self.band, band, most, strict=True))


def runs_of(mask: Tensor) -> Tensor:
    """Return [sequences, s, 3] of a mask [.., s, t], booleans or addends: the first and the last key of each row, and
    their number; 0 keys if heads differ, or addends do more than hide keys."""
    seen = _seen(mask)
    if seen is None:
        sequences = mask.shape[0] if mask.dim() == 4 else 1
        return torch.zeros((sequences, mask.shape[-2], 3), dtype=torch.int64, device=mask.device)
    marks = seen.to(torch.uint8)
    last = seen.shape[-1] - 1 - marks.flip(-1).argmax(-1)
    return torch.stack([marks.argmax(-1), last, seen.sum(-1)], -1)


def blocks_of(runs: Tensor) -> list[KeyBlock]:
    """Return the blocks of a mask by its ``runs_of``; [] if its blocks do not say all of it."""
    first, last, count = runs.unbind(-1)
    if bool((count == 0).any()):
        return []  # what a row without keys becomes depends on the kind of mask
    is_run = count == last - first + 1
    begins = torch.ones_like(first, dtype=torch.bool)
    begins[:, 1:] = (first[:, 1:] > last[:, :-1]) | (first[:, :-1] > last[:, 1:])
    per_row = torch.stack([begins.long(), first, last, is_run.long()], -1).tolist()
    alone = len(per_row) == 1
    return [b for number, rows in enumerate(per_row) for b in _of_sequence(-1 if alone else number, rows)]


def _seen(mask: Tensor) -> Tensor | None:
    """Return [sequences, s, t]: which keys a row reads; None if heads differ, or addends do more than that."""
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


def _of_sequence(number: int, rows: list[list[int]]) -> Iterator[KeyBlock]:
    """``rows``: of each whether a block begins with it, its first and last key, and whether it reads all between."""
    starts = [i for i, (begins, *_) in enumerate(rows) if begins]
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        here = rows[start:stop]
        keys, end = min(row[1] for row in here), max(row[2] for row in here) + 1
        yield KeyBlock(number, start, stop, keys, end, _band(here, keys, end))


def _band(rows: list[list[int]], keys: int, end: int) -> Band | None:
    stands = range(end - len(rows), end)
    left = {at - first for at, (_, first, _, _) in zip(stands, rows, strict=True) if first > keys}
    right = {last - at for at, (_, _, last, _) in zip(stands, rows, strict=True) if last < end - 1}
    if len(left) > 1 or len(right) > 1 or min(left | right, default=0) < 0 or not all(is_run for *_, is_run in rows):
        return None
    band = Band(*(found.pop() if found else -1 for found in (left, right)))
    wanted = [(first, last) for _, first, last, _ in rows]
    return band if [_reads(band, at, keys, end) for at in stands] == wanted else None


def _reads(band: Band, at: int, keys: int, end: int) -> tuple[int, int]:
    """Return the first and the last key of a row that stands at key ``at``."""
    first = keys if band.left < 0 else max(keys, at - band.left)
    last = end - 1 if band.right < 0 else min(end - 1, at + band.right)
    return first, last


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
    """Return whether this device has one for q, k and v [b, heads, s, d]."""
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) < _OLDEST:
        return False
    width = q.shape[3]
    alike = all(x.dtype == q.dtype and x.shape[3] == width for x in (k, v))
    return alike and q.dtype in HALF and width % 8 == 0 and width <= MOST_FEATURES


def segments_of(blocks: Sequence[KeyBlock], sequences: int, keys: int, device: torch.device) -> Segments | None:
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


def _band_of_all(blocks: Sequence[KeyBlock]) -> Band | None:
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
    """Return torch's kernel: newer versions ask whether key heads may be fewer than query heads; older ones take it."""
    from torch.nn.attention.varlen import varlen_attn  # it takes a second, which a rank without a GPU need not wait

    options: dict[str, Any] = {"window_size": tuple(band)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    return partial(varlen_attn, **options)
