"""Layout of parameters in a buffer: the slot of one, the tensors of one bucket, and the ranks that share the buffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from passes.parameters import LocalParameter
from planner.sharding.buckets import Bucket, Range


@dataclass(frozen=True, slots=True)
class DataParallel:
    """The ranks that share the buffers. ``sharded``: each rank owns 1/size of every bucket (ZeRO-1), else all."""

    group: Any = None
    size: int = 1
    rank: int = 0
    sharded: bool = True

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
        return is_first


@dataclass
class BucketTensors:
    """The tensors of one bucket: the full tensors, and the part (``own_…``) that this rank owns.

    ``contributions``: by parameter, how often a backward gives its gradient, if more than once.
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

    @property
    def position(self) -> int:
        """When the backward completes it."""
        return max(slot.position for slot in self.slots)

    def rearm(self) -> None:
        self.missing = {id(p): self.contributions.get(id(p), 1) for slot in self.slots for p in slot.parameters}
        self.work, self.is_reducing = None, False

    def arrived(self, parameter: Tensor) -> None:
        """One contribution to its gradient of the last microbatch is here."""
        left = self.missing.get(id(parameter), 0) - 1
        if left > 0:
            self.missing[id(parameter)] = left
        else:
            self.missing.pop(id(parameter), None)
