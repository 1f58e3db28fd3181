"""The rows of the gradient buffers."""

from __future__ import annotations

import torch

from planner.sharding.buckets import Bucket
from planner.sharding.buffers import BucketPlan, Buffer, BufferPlan, OptimizerPlan
from planner.spec.optimizer import OptimizerSpec


def optimizer_plan(optimizer: OptimizerSpec, buffers: tuple[Buffer, ...]) -> OptimizerPlan:
    """One row a buffer, by pp rank."""
    return OptimizerPlan(tuple(map(_buffer_row, buffers)), optimizer.name, optimizer.zero, optimizer.alignment)


def _buffer_row(buffer: Buffer) -> BufferPlan:
    return BufferPlan(
        buffer.pp_rank,
        _name(buffer.dtype),
        _name(buffer.gradient_dtype),
        buffer.layout.num_elements,
        buffer.layout.shard_elements(),
        tuple(map(_bucket_row, buffer.layout.buckets)),
        buffer.reduced_over,
    )


def _bucket_row(bucket: Bucket) -> BucketPlan:
    return BucketPlan(bucket.world.start, bucket.world.stop, tuple(slot.name for slot in bucket.slots))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
