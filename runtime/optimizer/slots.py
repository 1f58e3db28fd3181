"""Layout of parameters in a buffer: the slot of one, the tensors of one bucket, and the ranks that share the buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from passes.parameters import LocalParameter
from planner.sharding.buckets import Bucket, Range


@dataclass(frozen=True, slots=True)
class DataParallel:
    """The ranks that share the buffers. ``sharded``: each rank owns 1/size of every bucket (ZeRO-1), else all.

    ``of_weights``: the same ranks, for gathers that products wait for; ``group`` if there is no other.
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
    """A parameter's place: one view for its gradient, and the module parameters (several if tied) that feed it."""

    local: LocalParameter
    parameters: list[nn.Parameter]
    position: int  # in the order of the backward
    world: Range  # in the buffer
    main_grad: Tensor
    bucket: BucketTensors
    is_fresh: bool = True  # no gradient yet in this step

    def take(self) -> bool:
        """A gradient is coming: whether it is the first of the step, to be written and not added."""
        assert not self.bucket.is_reducing, f"a gradient of {self.local.fqn} came after the reduction of its bucket"
        is_first, self.is_fresh = self.is_fresh, False
        if is_first and self.bucket.scatters:
            self.bucket.open_gradients()
        return is_first


@dataclass
class BucketTensors:
    """The tensors of one bucket: the full tensors, and the part (``own_…``) that this rank owns.

    ``scatters``, ``gathers``: the full gradients, or parameters, have memory only for the time of their use, and the
    part that this rank owns has its own. ``gather``: a smaller dtype in which weights are sent. ``contributions``: by
    parameter, how often a backward gives its gradient, if more than once.
    ``missing``: of each parameter how many of them are to come in the last microbatch.
    """

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
    scatters: bool = False
    gathers: bool = False
    gather: torch.dtype | None = None
    shared_by: DataParallel = field(default_factory=DataParallel)

    @property
    def position(self) -> int:
        """When the backward completes it."""
        return max(slot.position for slot in self.slots)

    def open_gradients(self) -> None:
        """Memory for the full gradients, if there is none; what no parameter lies in is zero."""
        if take_memory(self.gradients):
            for start, stop in self.gaps:
                self.gradients[start:stop].zero_()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, all has memory, and zeros where no parameter lies; of parameters the own part is kept."""
        if self.gathers and take_memory(self.parameters):
            self.parameters.zero_()
        if self.scatters and take_memory(self.gradients):
            self.gradients.zero_()
        try:
            yield
        finally:
            if self.gathers:
                self.keep_own()
                give_memory_back(self.parameters)
            if self.scatters:
                give_memory_back(self.gradients)

    def keep_own(self) -> None:
        """The own part of the full parameters takes the place of the kept one."""
        self.own_parameters.copy_(self.parameters[self.own_range])

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Elements of the bucket in which no parameter lies."""
        first = self.layout.world.start
        places = sorted((slot.world.start - first, slot.world.stop - first) for slot in self.layout.slots)
        edges = [0, *(edge for place in places for edge in place), len(self.layout.world)]
        return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]

    @property
    def own_range(self) -> slice:
        """The part of the full tensors that this rank owns."""
        own = self.layout.shard(self.shared_by.shard_rank, self.shared_by.num_shards)
        return slice(own.start - self.layout.world.start, own.stop - self.layout.world.start)

    @property
    def held_parameters(self) -> list[tuple[str, Tensor]]:
        """The values of each parameter that lie here for good: all, or those of the own part."""
        if not self.gathers:
            return [(slot.local.fqn, slot.parameters[0].detach()) for slot in self.slots]
        return self.updated_parameters

    @property
    def updated_parameters(self) -> list[tuple[str, Tensor]]:
        """The values of each parameter that this rank updates, and others get from it."""
        owned = self.layout.owned_ranges(self.shared_by.shard_rank, self.shared_by.num_shards)
        return [(fqn, self.own_parameters[r.local.start : r.local.stop]) for fqn, r in owned.items()]

    def rearm(self) -> None:
        self.missing = self.awaited(id(p) for slot in self.slots for p in slot.parameters)
        self.work, self.is_reducing = None, False

    def awaited(self, parameters: Iterable[int]) -> dict[int, int]:
        """Of these, by id, how many gradients a backward gives each; without those that it gives none."""
        counts = {key: self.contributions.get(key, 1) for key in parameters}
        return {key: times for key, times in counts.items() if times}

    def arrived(self, parameter: Tensor) -> None:
        """One contribution to its gradient of the last microbatch is here."""
        left = self.missing.get(id(parameter), 0) - 1
        if left > 0:
            self.missing[id(parameter)] = left
        else:
            self.missing.pop(id(parameter), None)


def take_memory(tensor: Tensor) -> bool:
    """Memory for a tensor that gave it back; its views stay valid. Whether it had none."""
    storage, size = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    if storage.nbytes() == size:
        return False
    storage.resize_(size)
    return True


def give_memory_back(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def without_memory(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor that has none yet."""
    tensor = torch.empty(num_elements, dtype=dtype, device=device)
    give_memory_back(tensor)
    return tensor
