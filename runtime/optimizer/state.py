"""Optimizer state in a checkpoint: for each parameter, the elements that this rank owns, as views of its memory.

parameter      in the model's precision
main           if the optimizer's is higher
ema            the running mean of the weights, if the spec has optimizer.ema
exp_avg, …     the moments of the update rule; there are none before the first update that is not skipped
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from passes.parameters import LocalParameter
from planner.sharding.buckets import Range
from runtime.optimizer.slots import DataParallel
from runtime.optimizer.zero1 import DistributedOptimizer

AVERAGE = "ema"


@dataclass(frozen=True, slots=True)
class OwnedRun:
    """Elements ``range`` of the flattened part that this rank holds of a parameter; ``values`` of them by kind, 1-d.

    ``num_equal`` ranks own the same elements, and this is number ``copy`` of them.
    """

    local: LocalParameter
    range: Range
    values: dict[str, Tensor]
    num_equal: int = 1
    copy: int = 0


def owned_runs(optimizer: DistributedOptimizer) -> Iterator[OwnedRun]:
    """The runs of every trainable parameter; a tied one comes once."""
    has_moments = updates_of(optimizer)[0] > 0  # they are zero while every step was skipped
    for index, shard in enumerate(optimizer.shards):
        dp = shard.data_parallel
        locals_ = {slot.local.fqn: slot.local for slot in shard.bucket.slots}
        tensors = _tensors(optimizer, index, has_moments=has_moments)
        for fqn, owned in shard.bucket.owned.items():
            values = {kind: tensor[owned.local.start : owned.local.stop] for kind, tensor in tensors.items()}
            yield OwnedRun(locals_[fqn], owned.param, values, *_copies(optimizer, dp, locals_[fqn]))


def frozen_runs(optimizer: DistributedOptimizer) -> Iterator[OwnedRun]:
    """Those of the frozen parameters of which ranks keep shards."""
    for buffer in optimizer.buffers.buffers:
        for bucket in buffer.buckets if buffer.planned.is_frozen else ():
            dp, locals_ = bucket.shared_by, buffer.planned.by_name
            for fqn, owned in bucket.owned.items():
                values = {"parameter": bucket.own_parameters[owned.local.start : owned.local.stop]}
                yield OwnedRun(locals_[fqn], owned.param, values, *_copies(optimizer, dp, locals_[fqn]))


def _copies(optimizer: DistributedOptimizer, shared_by: DataParallel, local: LocalParameter) -> tuple[int, int]:
    """How many ranks own the same elements, and which of them this one is."""
    within, here = shared_by.size // shared_by.num_shards, 0 if shared_by.sharded else shared_by.rank
    copy, copies = optimizer.copy_of_shards if local.expert is None else (0, 1)
    return within * copies, copy * within + here


def updates_of(optimizer: DistributedOptimizer) -> tuple[int, dict[str, int]]:
    """The number of updates that were not skipped, which a bias correction uses; 0 on a rank without trainable
    parameters. Beside it those of the parameters that may rest, and lie here."""
    return optimizer.optimizer.updates() if optimizer.optimizer is not None else (0, {})


def begin_at(optimizer: DistributedOptimizer, updates: int, updates_of: Mapping[str, int]) -> None:
    """Moments of zero and counts of updates, before a checkpoint's moments are read into them."""
    if optimizer.optimizer is not None:
        optimizer.optimizer.begin(updates, updates_of)


def _tensors(optimizer: DistributedOptimizer, index: int, *, has_moments: bool) -> dict[str, Tensor]:
    """Of one shard, by kind."""
    shard = optimizer.shards[index]
    found = {"parameter": shard.bucket.own_parameters}
    if shard.owns_main:
        found["main"] = shard.main
    if optimizer.average is not None:
        found[AVERAGE] = optimizer.average.of(index)
    if has_moments and optimizer.optimizer is not None:
        found |= optimizer.optimizer.state[shard.main]
    return found
