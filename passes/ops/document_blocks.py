"""The blocks of a mask that lets each token read a run of keys, read off its values.

mask                       blocks
1 . . . . .                rows 0 to 3 × keys 0 to 3, causal
1 1 . . . .                rows 4 to 5 × keys 4 to 5, causal
1 1 1 . . .
1 1 1 1 . .                a block ends where a row reads none of the keys of the row before it
. . . . 1 .
. . . . 1 1
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CAUSAL, WHOLE, MASKED = "causal", "whole", "masked"


class Block(NamedTuple):
    """Rows ``first`` to ``stop`` of sequence ``sequence`` (-1: of every one) read ``keys`` to ``end``.

    Causal: the last row reads all of these keys, each row before it one less.
    """

    sequence: int
    first: int
    stop: int
    keys: int
    end: int
    kind: str

    @property
    def rows(self) -> int:
        return self.stop - self.first

    @property
    def is_square(self) -> bool:
        return self.rows == self.end - self.keys


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
    is_causal = all(end - last == len(rows) - i for i, (_, _, last, _) in enumerate(rows))
    return CAUSAL if is_causal else MASKED
