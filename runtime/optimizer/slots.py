"""Layout of parameters in a buffer: the slot of one, the tensors of one bucket, and the ranks that share the buffer.

Over gloo, reduce-scatter and all-gather stay inside the buffer. Its own ones copy the full buffer in a thread of
theirs, and its heap keeps the place: with one bucket that is all gradients, and all parameters, once more. So there

    reduce-scatter      all-reduce of the buffer (as gloo does with its copy); only the own shard is read
    all-gather          each part is broadcast by its owner
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import all_reduce, broadcast

from passes.ops.axis import all_gather_single, reduce_scatter_single
from passes.ops.weight_gradients import Add
from passes.parameters import LocalParameter
from planner.sharding.buckets import Bucket, OwnedRange, Range
from planner.sharding.buffers import Buffer


@dataclass(frozen=True, slots=True)
class DataParallel:
    """The ranks that share the buffers. ``sharded``: each rank owns 1/size of every bucket (ZeRO-1), otherwise all.

    ``of_weights``: a group of the same ranks for all-gathers that products wait for; ``group`` without one.
    """

    group: Any = None
    size: int = 1
    rank: int = 0
    sharded: bool = True
    of_weights: Any = None

    @property
    def num_shards(self) -> int:
        return self.size if self.sharded else 1

    @property
    def shard_rank(self) -> int:
        return self.rank if self.sharded else 0


@dataclass
class ParameterSlot:
    """The place of a parameter: the view for its gradient, and the module parameters (several if tied) with it."""

    local: LocalParameter
    parameters: list[nn.Parameter]
    position: int  # in the order of the backward
    world: Range  # in the buffer
    main_grad: Tensor
    bucket: BucketTensors
    is_fresh: bool = True  # no gradient yet in this step

    def take(self) -> bool:
        """Return whether the next gradient is the first of the step, which is written instead of added."""
        assert not self.bucket.is_reducing, f"a gradient of {self.local.fqn} came after the reduction of its bucket"
        is_first, self.is_fresh = self.is_fresh, False
        if is_first and self.bucket.planned.scatters:
            self.bucket.open_gradients()
        return is_first


@dataclass
class BucketTensors:
    """The tensors of one bucket of a ``planned`` buffer: full ones, and the part (``own_…``) that this rank owns.

    If the buffer scatters (gathers), the full gradients (parameters) have memory only while they are used, and the part
    that this rank owns has its own. ``shared_by``: the ranks that share the buffer. ``contributions``: id of a
    parameter → number of its gradients in a backward, if not 1. ``missing``: those to come in the last microbatch.
    """

    planned: Buffer
    shared_by: DataParallel
    layout: Bucket
    parameters: Tensor
    gradients: Tensor
    own_parameters: Tensor
    own_gradients: Tensor
    slots: list[ParameterSlot] = field(default_factory=list)
    contributions: dict[int, int] = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)
    work: Any = None
    is_reducing: bool = False

    @property
    def position(self) -> int:
        """Position in the backward at which the bucket is complete."""
        return max(slot.position for slot in self.slots)

    def open_gradients(self) -> None:
        """Allocate memory for the full gradients if there is none, with zeros between parameters."""
        if take_memory(self.gradients):
            for start, stop in self.gaps:
                self.gradients[start:stop].zero_()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Give all tensors memory for the block, with zeros between parameters; keep this rank's part afterwards."""
        if self.planned.gathers and take_memory(self.parameters):
            self.parameters.zero_()
        if self.planned.scatters and take_memory(self.gradients):
            self.gradients.zero_()
        try:
            yield
        finally:
            if self.planned.gathers:
                self.keep_own()
                give_memory_back(self.parameters)
            if self.planned.scatters:
                give_memory_back(self.gradients)

    def keep_own(self) -> None:
        """Copy this rank's part of the full parameters to the kept part."""
        self.own_parameters.copy_(self.parameters[self.own_range])

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Runs of elements that belong to no parameter."""
        first = self.layout.world.start
        places = ((slot.world.start - first, slot.world.stop - first) for slot in self.layout.slots)
        return between(places, len(self.layout.world))

    @property
    def own_range(self) -> slice:
        """The part of the full tensors that this rank owns."""
        own = self.layout.shard(self.shared_by.shard_rank, self.shared_by.num_shards)
        return slice(own.start - self.layout.world.start, own.stop - self.layout.world.start)

    @property
    def held_parameters(self) -> list[tuple[str, Tensor]]:
        """The values of each parameter that stay in memory: all, or this rank's part."""
        if not self.planned.gathers:
            return [(slot.local.fqn, slot.parameters[0].detach()) for slot in self.slots]
        return self.updated_parameters

    @property
    def owned(self) -> dict[str, OwnedRange]:
        """Parameter → the elements that this rank updates, in its part and in the parameter."""
        return self.layout.owned_ranges(self.shared_by.shard_rank, self.shared_by.num_shards)

    @property
    def updated_parameters(self) -> list[tuple[str, Tensor]]:
        """The values of each parameter that this rank updates."""
        return [(fqn, self.own_parameters[r.local.start : r.local.stop]) for fqn, r in self.owned.items()]

    def awaited(self, parameters: Iterable[int]) -> dict[int, int]:
        """Return id of a parameter → number of its gradients in a backward, without zeros."""
        counts = {key: self.contributions.get(key, 1) for key in parameters}
        return {key: times for key, times in counts.items() if times}

    def arrived(self, parameter: Tensor) -> None:
        """Note that one contribution to the gradient of the last microbatch has arrived."""
        left = self.missing.get(id(parameter), 0) - 1
        if left > 0:
            self.missing[id(parameter)] = left
        else:
            self.missing.pop(id(parameter), None)


def between(runs: Iterable[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Return the runs of ``size`` elements that belong to none of the disjoint ``runs``."""
    edges = [0, *(edge for run in sorted(runs) for edge in run), size]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def take_memory(tensor: Tensor) -> bool:
    """Allocate memory for a tensor without; its views stay valid. Return whether it had none."""
    storage, size = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    if storage.nbytes() == size:
        return False
    storage.resize_(size)
    return True


def give_memory_back(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def without_memory(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a flat tensor without memory."""
    tensor = torch.empty(num_elements, dtype=dtype, device=device)
    give_memory_back(tensor)
    return tensor


@dataclass(frozen=True, slots=True)
class Added:
    """Gradient memory that already contains a sum."""

    main_grad: Tensor

    def take(self) -> bool:
        return False


class ParameterPlace:
    """The place to which products add a gradient. ``arrived(parameter)`` is called for each contribution."""

    __slots__ = ("_arrived", "_parameter", "_slot")

    def __init__(self, slot: ParameterSlot | Added, parameter: Any, arrived: Callable[[Any], None]) -> None:
        self._slot, self._parameter, self._arrived = slot, parameter, arrived

    def add(self, add: Add, *values: Any) -> None:
        add(self._slot.main_grad, *values, is_fresh=self._slot.take())
        self._arrived(self._parameter)

    def add_nothing(self) -> None:
        self._arrived(self._parameter)


class Works:
    """Several collectives that are waited for together."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def reduce_scatter(own: Tensor, whole: Tensor, *, group: Any, async_op: bool = False) -> Any:
    """Sum ``own``, a view of ``whole``, over the ranks, in place; the rest of ``whole`` is overwritten."""
    if whole.device.type == "cpu":
        return all_reduce(whole, group=group, async_op=async_op)
    return reduce_scatter_single(own, whole, group=group, async_op=async_op)


def all_gather(whole: Tensor, own: Tensor, *, group: Any, async_op: bool = False) -> Any:
    """Gather the equal parts of all ranks in ``whole``; ``own`` may be a view of its part."""
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
