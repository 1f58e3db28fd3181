"""A rank's share of each bucket in the optimizer's precision, and the order in which ranks sum these shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from passes.parameters import LocalParameter
from planner.sharding.buckets import OwnedRange
from planner.sharding.collectives import SUMS
from runtime.optimizer.buffers import BufferTensors
from runtime.optimizer.norm import whole_elements
from runtime.optimizer.slots import BucketTensors, DataParallel


@dataclass
class MainShard:
    """This rank's share of one bucket in the optimizer's precision; views of the buffers if the dtypes agree."""

    buffer: BufferTensors
    bucket: BucketTensors
    main: Tensor
    grad: Tensor
    counted: tuple[tuple[int, int], ...]  # runs of ``grad`` that this rank counts in the norm
    whole: Tensor | None  # indices of elements that every tp (or etp) rank holds, among others that are cut (segments)

    @property
    def data_parallel(self) -> DataParallel:
        return self.buffer.data_parallel

    @property
    def owns_main(self) -> bool:
        return self.main.dtype != self.bucket.parameters.dtype

    @property
    def owns_grad(self) -> bool:
        return self.grad.dtype != self.bucket.gradients.dtype


def whole_indices(owned: Mapping[str, OwnedRange], locals_: Mapping[str, LocalParameter], size: int) -> Tensor:
    indices = [torch.empty(0, dtype=torch.int64)]
    for fqn, r in owned.items():
        is_whole = whole_elements(locals_[fqn], size)[r.param.start : r.param.stop]
        indices.append(is_whole.nonzero().view(-1) + r.local.start)
    return torch.cat(indices)


def size_and_rank(group: Any) -> tuple[int, int]:
    return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))


def in_common_order(axes: Iterable[tuple[str, ...]]) -> list[str]:
    """Each axis once, in an order that all ranks agree on though they hold different buffers: no cycle of waits."""
    return sorted({axis for of_shard in axes for axis in of_shard}, key=SUMS.index)


def tied_order(shard: MainShard) -> tuple[Any, ...]:
    """Among tied buffers the same order on all stages; the sort keeps the order of the others."""
    planned = shard.buffer.planned
    sums = (planned.reduced_over, planned.partial_over, planned.has_whole_segment)
    return (planned.tied_stages, str(planned.dtype), *sums) if planned.tied_stages else ((),)
