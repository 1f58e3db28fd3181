"""The rows of the gradient buffers, and a note on vectors with weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from planner.mesh import Mesh
from planner.sharding.buckets import Bucket
from planner.sharding.buffers import BucketPlan, Buffer, BufferPlan, OptimizerPlan
from planner.sharding.homes import Homed, Homes, homes_of
from planner.sharding.parameters import ParameterPlan
from planner.spec.optimizer import OptimizerSpec
from planner.tables.rows import Diagnostic
from planner.updates.groups import base_of, settings_of
from planner.updates.rules import UpdateRules


def optimizer_plan(
    optimizer: OptimizerSpec, buffers: tuple[Buffer, ...], mesh: Mesh, rules: UpdateRules
) -> OptimizerPlan:
    """One row a buffer, by pp rank."""
    rows = tuple(_buffer_row(buffer, homes_of(buffer, mesh, rules)) for buffer in buffers)
    return OptimizerPlan(rows, optimizer.name, optimizer.planned_zero, optimizer.alignment)


def decay_notes(
    optimizer: OptimizerSpec, parameters: tuple[ParameterPlan, ...], buffers: Iterable[Buffer]
) -> Iterator[Diagnostic]:
    """One note if norms and biases have weight decay, which most recipes leave out."""
    base, own = base_of(optimizer), settings_of(optimizer, parameters)
    trained = {slot.name for b in buffers if not b.is_frozen for bucket in b.layout.buckets for slot in bucket.slots}
    vectors = [row.name for row in parameters if len(row.shape) < 2 and row.name in trained]
    decayed = [name for name in vectors if own.get(name, base).weight_decay]
    if decayed:
        yield Diagnostic(
            "info",
            f"norms and biases are decayed: {len(decayed)} parameters with fewer than two dims, such as {decayed[0]}",
            "optimizer.no_decay",
            "set optimizer.no_decay: vectors to leave them out",
        )


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
