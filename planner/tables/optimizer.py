"""The rows of the gradient buffers."""

from __future__ import annotations

import torch

from planner.mesh import Mesh
from planner.sharding.buckets import Bucket
from planner.sharding.buffers import BucketPlan, Buffer, BufferPlan, OptimizerPlan
from planner.sharding.homes import Homed, Homes, homes_of
from planner.spec.optimizer import OptimizerSpec
from planner.updates.rules import UpdateRules


def optimizer_plan(
    optimizer: OptimizerSpec, buffers: tuple[Buffer, ...], mesh: Mesh, rules: UpdateRules
) -> OptimizerPlan:
    """One row a buffer, by pp rank."""
    rows = tuple(_buffer_row(buffer, homes_of(buffer, mesh, rules)) for buffer in buffers)
    return OptimizerPlan(rows, optimizer.name, optimizer.planned_zero, optimizer.alignment)


def _buffer_row(buffer: Buffer, homes: Homes | None) -> BufferPlan:
    of_buckets = [()] * len(buffer.layout.buckets) if homes is None else homes.buckets
    return BufferPlan(
        buffer.pp_rank,
        _name(buffer.dtype),
        _name(buffer.gradient_dtype),
        buffer.layout.num_elements,
        buffer.layout.shard_elements(),
        tuple(map(_bucket_row, buffer.layout.buckets, of_buckets)),
        buffer.reduced_over,
        buffer.rule,
        "" if homes is None else homes.axis,
    )


def _bucket_row(bucket: Bucket, homed: tuple[Homed, ...]) -> BucketPlan:
    names = tuple(slot.name for slot in bucket.slots)
    return BucketPlan(bucket.world.start, bucket.world.stop, names, tuple(h.home for h in homed))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
