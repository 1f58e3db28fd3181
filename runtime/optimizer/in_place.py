"""Reduce-scatter and all-gather between a buffer and the part of it that this rank owns.

Over gloo both stay inside the buffer. Its own ones copy the full buffer in a thread of theirs, and its heap
keeps the place: with one bucket that is all gradients, and all parameters, once more. So there

    reduce-scatter      all-reduce of the buffer (as gloo does with its copy); only the own shard is read
    all-gather          each part is broadcast by its owner
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import all_reduce, broadcast

from passes.ops.runs import all_gather_single, reduce_scatter_single


class Works:
    """Several exchanges that end together."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def reduce_scatter(own: Tensor, whole: Tensor, *, group: Any, async_op: bool = False) -> Any:
    """``own``, a view of ``whole``, becomes its sum over the ranks; the rest of ``whole`` is overwritten."""
    if whole.device.type == "cpu":
        return all_reduce(whole, group=group, async_op=async_op)
    return reduce_scatter_single(own, whole, group=group, async_op=async_op)


def all_gather(whole: Tensor, own: Tensor, *, group: Any, async_op: bool = False) -> Any:
    """The equal parts of all ranks, in their order; ``own`` may be a view of its part already."""
    if whole.device.type != "cpu":
        return all_gather_single(whole, own, group=group, async_op=async_op)
    num_ranks = dist.get_world_size(group)
    parts = whole.view(num_ranks, -1).unbind(0)
    mine = parts[dist.get_rank(group)]
    if mine.data_ptr() != own.data_ptr():
        mine.copy_(own)
    owners = [dist.get_global_rank(group, index) for index in range(len(parts))]
    works = Works([broadcast(p, owner, group=group, async_op=True) for p, owner in zip(parts, owners, strict=True)])
    return works if async_op else works.wait()
