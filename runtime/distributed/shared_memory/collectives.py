"""Which rounds a collective takes, for flat tensors that lie in one piece.

    all-reduce       two ranks, or little     each puts all, and sums all                       one round a chunk
                     else                     each sums its part of a chunk, then shows it      two rounds a chunk
    reduce-scatter                            each puts a piece of every rank's part            one round a piece
    all-gather                                each puts a piece of its own                      one round a piece

Sums are taken in the order of ranks, by whoever takes them: every rank has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from runtime.distributed.shared_memory.rounds import SLOT_BYTES, Round, Slot

LITTLE_BYTES = 1 << 15
Reduction = Callable[..., Tensor]
_REDUCTIONS = ((ReduceOp.SUM, torch.add), (ReduceOp.MAX, torch.maximum), (ReduceOp.MIN, torch.minimum))


def reduction(op: Any) -> Reduction | None:
    """What joins two ranks' elements; None for an operation that gloo is left with."""
    return next((reduce for known, reduce in _REDUCTIONS if op == known), None)


def all_reduce(x: Tensor, reduce: Reduction, rank: int, size: int) -> Iterator[Round]:
    """``x`` becomes its sum (or maximum or minimum) over the ranks."""
    at_once = size == 2 or x.numel() * x.element_size() <= LITTLE_BYTES
    for chunk in x.split(SLOT_BYTES // x.element_size()) if x.numel() else ():
        if at_once:
            yield Round(partial(_put, chunk), partial(_sum, chunk, reduce, 0))
        else:
            parts = chunk.tensor_split(size)
            start = sum(part.numel() for part in parts[:rank])
            yield Round(partial(_put, chunk), partial(_sum, parts[rank], reduce, start))
            yield Round(partial(_put, parts[rank]), partial(_copy, parts), waits=True)


def reduce_scatter(own: Tensor, whole: Tensor, reduce: Reduction, rank: int, size: int) -> Iterator[Round]:
    """``own`` becomes this rank's part of the sum; it may be a view of its place in ``whole``."""
    parts = whole.view(size, -1)
    step = SLOT_BYTES // (size * whole.element_size())
    for start in range(0, own.numel(), step):
        piece = own[start : start + step]
        yield Round(partial(_put, parts[:, start : start + step]), partial(_sum, piece, reduce, rank * piece.numel()))


def all_gather(whole: Tensor, own: Tensor, size: int) -> Iterator[Round]:
    """``whole`` becomes the ranks' ``own`` behind each other; ``own`` may be a view of its place there."""
    parts = whole.view(size, -1)
    step = SLOT_BYTES // whole.element_size()
    for start in range(0, own.numel(), step):
        yield Round(partial(_put, own[start : start + step]), partial(_copy, parts[:, start : start + step]))


def _put(x: Tensor, slot: Slot) -> None:
    slot.first(x.numel(), x).view(x.shape).copy_(x)


def _sum(out: Tensor, reduce: Reduction, start: int, slots: Sequence[Slot]) -> None:
    """From the elements that begin at ``start`` of every slot."""
    given = [slot.first(start + out.numel(), out)[start:] for slot in slots]
    reduce(given[0], given[1], out=out)
    for other in given[2:]:
        reduce(out, other, out=out)


def _copy(parts: Iterable[Tensor], slots: Sequence[Slot]) -> None:
    for part, slot in zip(parts, slots, strict=True):
        part.copy_(slot.first(part.numel(), part))
