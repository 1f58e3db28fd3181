"""A rank's share of each bucket in the optimizer's precision, and the order in which ranks sum these shares.

The global gradient norm counts each logical element once, whatever ranks hold copies of it:

|g|² = Σ over ranks, over the runs of its shards that a rank counts, of Σ g²

A running mean of the weights (Polyak averaging) is kept on the flat shards that this rank updates:

    a <- a + (1 - decay) · (w - a)      after each update that is not skipped; w: the main shard

It begins with the weights themselves. Each operation rounds an element on its own, so a shard of another layout has
the same bits.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from passes.parameters import LocalParameter
from planner.sharding.buckets import OwnedRange
from planner.sharding.shards import SUMS
from planner.spec.update_rules import MEAN_RULES
from runtime.optimizer.flat import FlatOptimizer
from runtime.optimizer.rules import mean_of
from runtime.optimizer.slots import BucketTensors

_NORM_CHUNK = 4096  # float32 sums of squares stay exact enough over this many elements; chunks add up in float64


@dataclass
class MainShard:
    """This rank's share of one bucket in the optimizer's precision; views of the buffers if the dtypes agree."""

    bucket: BucketTensors
    main: Tensor
    grad: Tensor
    counted: tuple[tuple[int, int], ...]  # runs of ``grad`` that this rank counts in the norm
    whole: Tensor | None  # indices of elements that every tp (or etp) rank holds, among others that are cut (segments)

    @property
    def owns_main(self) -> bool:
        return self.main.dtype != self.bucket.parameters.dtype


def whole_indices(owned: Mapping[str, OwnedRange], locals_: Mapping[str, LocalParameter], size: int) -> Tensor:
    indices = [torch.empty(0, dtype=torch.int64)]
    for fqn, r in owned.items():
        is_whole = whole_elements(locals_[fqn], size)[r.param.start : r.param.stop]
        indices.append(is_whole.nonzero().view(-1) + r.local.start)
    return torch.cat(indices)


def size_and_rank(group: Any) -> tuple[int, int]:
    return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))


def in_common_order(axes: Iterable[tuple[str, ...]]) -> list[str]:
    """Return each axis once, in an order that is equal on all ranks, though they hold different buffers."""
    return sorted({axis for of_shard in axes for axis in of_shard}, key=SUMS.index)


def tied_order(shard: MainShard) -> tuple[Any, ...]:
    """Return a sort key that orders tied buffers equally on all stages; a stable sort keeps the order of others."""
    planned = shard.bucket.planned
    sums = (planned.reduced_over, planned.partial_over, planned.has_whole_segment)
    return (planned.tied_stages, str(planned.dtype), *sums) if planned.tied_stages else ((),)


def squared_norm(values: Tensor) -> Tensor:
    """Return the sum of squares of a flat tensor in float64, without a float64 copy of it.

    torch's float32 norm of 40 M elements is off by 0.3 % on a CPU: it sums them sequentially.
    """
    size = values.numel() - values.numel() % _NORM_CHUNK
    chunks = torch.linalg.vector_norm(values[:size].view(-1, _NORM_CHUNK), dim=1)
    tail = torch.linalg.vector_norm(values[size:])
    return chunks.double().square().sum() + tail.double().square()


def whole_elements(local: LocalParameter, size: int) -> Tensor:
    """Return a flat mask of the local tensor: True in segments that are replicated over its axis."""
    mask = torch.zeros(local.shape, dtype=torch.bool)
    for start, stop in local.whole_runs(size):
        mask.narrow(local.placement.dim, start, stop - start).fill_(True)
    return mask.view(-1)


def merged_runs(runs: Iterable[tuple[int, int, bool]]) -> tuple[tuple[int, int], ...]:
    """Return the counted runs, joined over the (zero) padding between neighbours."""
    merged: list[tuple[int, int]] = []
    continues = False
    for start, stop, is_counted in runs:
        if is_counted and continues:
            merged[-1] = (merged[-1][0], stop)
        elif is_counted:
            merged.append((start, stop))
        continues = is_counted
    return tuple(merged)


class WeightAverage:
    """The mean of each shard, in the shard's dtype. ``mains``: the shards. ``held``: the memory of the means."""

    def __init__(self, mains: Sequence[Tensor], decay: float) -> None:
        self._mains, self._decay = list(mains), decay
        self.held = [main.detach().clone() for main in mains]

    def of(self, index: int) -> Tensor:
        """Return the mean of one shard."""
        return self.held[index]

    def start(self) -> None:
        """Begin with the current weights."""
        for average, main in zip(self.held, self._mains, strict=True):
            average.copy_(main)

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """Update the means after a step; ``found_inf`` (on the device) is 1 if it was skipped: then nothing changes."""
        share = (1.0 - self._decay) * (1.0 - found_inf.to(torch.float64))
        for average, main in zip(self.held, self._mains, strict=True):
            average.add_((main - average).mul_(share))

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange weights and means; a second call restores both bitwise."""
        for average, main in zip(self.held, self._mains, strict=True):
            kept = main.clone()
            main.copy_(average)
            average.copy_(kept)


class ScheduleFreeMean:
    """The mean that a schedule-free rule evaluates, computed from a shard and its distances on request.

    ``optimizer``: of the shards; None on a rank without shards.
    """

    held: Sequence[Tensor] = ()  # no memory of its own

    def __init__(self, optimizer: FlatOptimizer | None) -> None:
        self._optimizer = optimizer
        self._shards = [] if optimizer is None else optimizer.shards
        self._kept: list[Tensor] = []

    def start(self) -> None:
        """Do nothing: where the distances are zero, the mean is the weights."""

    def update(self, found_inf: Tensor) -> None:
        """Do nothing: the rule has moved the weights and the distances."""

    def of(self, index: int) -> Tensor:
        """Return the mean of one shard, as a new tensor."""
        assert self._optimizer is not None, "a shard has an optimizer"
        shard = self._shards[index]
        main, distance = shard.main, self._optimizer.state[shard.main].get("distance")
        mean = main.detach().clone()
        if distance is None:
            return mean
        for start, stop, settings in self._optimizer.settings_of(shard, 0, len(main)):
            if settings.rule in MEAN_RULES:
                mean[start:stop] = mean_of(main[start:stop], distance[start:stop], settings)
        return mean

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange weights and means; a second call restores the weights bitwise."""
        mains, before = [shard.main for shard in self._shards], self._kept
        means = before or [self.of(index) for index in range(len(mains))]
        self._kept = [] if before else [main.detach().clone() for main in mains]
        for main, mean in zip(mains, means, strict=True):
            main.copy_(mean)
