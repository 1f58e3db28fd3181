"""The gradient buffers of every pp rank, as the runtime lays them out, and what a step exchanges over them.

buffer      a rank's trainable parameters of one dtype whose gradients need the same sums (over tp, over the stages
            that hold a tied weight); cut into buckets, each bucket into one shard for each dp rank
exchanges   dp: reduce-scatter of each bucket, all-gather of its parameters (zero 0: one all-reduce)
            tp, embedding: all-reduce of each bucket's shard, where gradients are partial sums
            world: one all-reduce of [|g|², loss]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import fx

from planner.cost.memory import LocalSizes
from planner.decisions import PlanSource
from planner.placement.types import Placement
from planner.sharding import buckets
from planner.sharding.buckets import BufferLayout
from planner.spec.spec import Spec
from planner.tables.rows import BucketPlan, BufferPlan, CollectivePlan, MemoryRow, OptimizerPlan

LOW_PRECISION = (torch.bfloat16, torch.float16)
_NUM_MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0}


@dataclass(frozen=True, slots=True)
class Held:
    """A trainable parameter on one rank: its user's name, dtype, cut, and whose gradients must be added together."""

    name: str
    dtype: torch.dtype
    placement: Placement
    local_shape: tuple[int, ...]
    partial_over: tuple[str, ...]
    tied_stages: tuple[int, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Parameters of one key share a buffer."""
        has_whole = self.placement.has_whole_segment and "tp" in self.partial_over
        return self.dtype, self.partial_over, self.tied_stages, has_whole


@dataclass(frozen=True)
class Buffer:
    """One buffer of ``pp_rank``. ``gradient_dtype`` is that of the buffer; shards are summed in ``main_dtype``."""

    pp_rank: int
    gradient_dtype: torch.dtype
    held: tuple[Held, ...]
    layout: BufferLayout

    @property
    def dtype(self) -> torch.dtype:
        return self.held[0].dtype

    @property
    def main_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @cached_property
    def by_name(self) -> dict[str, Held]:
        return {h.name: h for h in self.held}

    def optimizer_bytes(self, name: str) -> int:
        """Bytes of one rank's moments, and of its main parameters and gradients where the buffers are less precise."""
        main = self.main_dtype.itemsize
        copies = (self.dtype != self.main_dtype) + (self.gradient_dtype != self.main_dtype)
        return self.layout.shard_elements() * main * (_NUM_MOMENTS.get(name, 2) + copies)


def buffers_of(spec: Spec, source: PlanSource) -> tuple[Buffer, ...]:
    """Every buffer, by pp rank, in the order in which the runtime makes them."""
    return tuple(buffer for rank in range(source.mesh.pp) for buffer in _buffers_of_rank(spec, source, rank))


def _buffers_of_rank(spec: Spec, source: PlanSource, rank: int) -> Iterator[Buffer]:
    groups: dict[tuple[object, ...], dict[str, Held]] = {}
    held = [_held(source, node) for node in _parameters_of_rank(source, rank) if node.meta["grad"]]
    low = any(node.meta["val"].dtype in LOW_PRECISION for node in _parameters_of_rank(source, rank))
    for parameter in held:
        groups.setdefault(parameter.key, {}).setdefault(parameter.name, parameter)
    for group in groups.values():
        members = tuple(group.values())
        if members[0].tied_stages:  # the stages of a tied weight must agree on the layout
            members = tuple(sorted(members, key=lambda h: h.name))
        default = "float32" if low else str(members[0].dtype).removeprefix("torch.")
        gradient_dtype = getattr(torch, spec.precision.gradients or default)
        yield Buffer(rank, gradient_dtype, members, _layout(spec, source.mesh.dp, members))


def _layout(spec: Spec, dp: int, members: tuple[Held, ...]) -> BufferLayout:
    optimizer = spec.optimizer
    sharded = optimizer.zero == 1
    return buckets.lay_out(
        ((h.name, prod(h.local_shape)) for h in members),
        dp if sharded else 1,
        alignment=optimizer.alignment if sharded else "none",
        bucket_size=optimizer.bucket_size or buckets.default_bucket_size(dp, optimizer.alignment),
    )


def _parameters_of_rank(source: PlanSource, rank: int) -> Iterator[fx.Node]:
    """The parameters of a pp rank's stages, chunk by chunk, in graph order."""
    program, stages = source.program, source.stages
    placeholders = [n for n in program.graph.graph.find_nodes(op="placeholder") if n.name in program.parameters]
    for stage in range(rank, stages.num_stages, source.mesh.pp):
        yield from (n for n in placeholders if stage in stages.parameter_stages.get(n.name, ()))


def _held(source: PlanSource, node: fx.Node) -> Held:
    placement, tp = source.placements.of(node), source.mesh.tp
    stages = source.stages.parameter_stages[node.name]
    partial = tp > 1 and (placement.kind == "R" or placement.has_whole_segment)
    tied = stages if len(stages) > 1 else ()
    over = (*(("embedding",) if tied else ()), *(("tp",) if partial else ()))
    shape = placement.local_shape(tuple(node.meta["val"].shape), tp)
    return Held(source.program.parameters[node.name], node.meta["val"].dtype, placement, shape, over, tied)


def optimizer_plan(spec: Spec, all_buffers: tuple[Buffer, ...]) -> OptimizerPlan:
    """The buffers' rows."""
    rows = tuple(
        BufferPlan(
            b.pp_rank,
            _name(b.dtype),
            _name(b.gradient_dtype),
            b.layout.num_elements,
            b.layout.shard_elements(),
            tuple(map(_bucket_row, b.layout.buckets)),
        )
        for b in all_buffers
    )
    return OptimizerPlan(rows, spec.optimizer.name, spec.optimizer.zero, spec.optimizer.alignment)


def _bucket_row(bucket: buckets.Bucket) -> BucketPlan:
    return BucketPlan(bucket.world.start, bucket.world.stop, tuple(slot.name for slot in bucket.slots))


def step_rows(spec: Spec, source: PlanSource, all_buffers: tuple[Buffer, ...]) -> tuple[CollectivePlan, ...]:
    """What a step exchanges after its last backward has begun; ``stage`` is the first stage of the pp rank."""
    rows = [row for i, buffer in enumerate(all_buffers) for row in _buffer_rows(spec, source, i, buffer)]
    if source.mesh.world_size > 1:
        where = "gradient norm and loss"
        rows.append(CollectivePlan("all_reduce", "world", "step", where, 2 * torch.float64.itemsize, 1, "step"))
    return tuple(rows)


def _buffer_rows(spec: Spec, source: PlanSource, index: int, buffer: Buffer) -> Iterator[CollectivePlan]:
    sharded = spec.optimizer.zero == 1
    partial_over = buffer.held[0].partial_over
    over = [axis for axis in ("tp", "embedding") if axis in partial_over and _spans(source, axis, buffer)]
    for bucket in buffer.layout.buckets:
        place = f"optimizer.buffers.{index}.buckets.{bucket.index}   ({_contents(bucket)})"

        def row(kind: str, axis: str, size: int, place: str = place) -> CollectivePlan:
            return CollectivePlan(kind, axis, "step", place, size, 1, "step", buffer.pp_rank)

        if source.mesh.dp > 1:
            size = len(bucket.world) * buffer.gradient_dtype.itemsize
            yield row("reduce_scatter" if sharded else "all_reduce", "dp", size)
        for axis in over:
            yield row("all_reduce", axis, _summed_elements(source, buffer, bucket, axis) * buffer.main_dtype.itemsize)
        if source.mesh.dp > 1 and sharded:
            yield row("all_gather", "dp", len(bucket.world) * buffer.dtype.itemsize)


def _spans(source: PlanSource, axis: str, buffer: Buffer) -> bool:
    """Whether the sum needs another rank: chunks of one rank share a tied weight without."""
    return axis == "tp" or len({stage % source.mesh.pp for stage in buffer.held[0].tied_stages}) > 1


def _contents(bucket: buckets.Bucket) -> str:
    first, last = bucket.slots[0].name, bucket.slots[-1].name
    return f"gradients of {first}" if first == last else f"gradients of {len(bucket.slots)} parameters"


def _summed_elements(source: PlanSource, buffer: Buffer, bucket: buckets.Bucket, axis: str) -> int:
    """Elements of a shard that are added over ``axis``; of parameters with whole segments over tp only those."""
    num_shards = buffer.layout.num_ranks
    if axis != "tp" or not buffer.held[0].placement.has_whole_segment:
        return len(bucket.world) // num_shards
    owned = (bucket.owned_ranges(rank, num_shards) for rank in range(num_shards))
    return max(
        sum(
            whole_elements(buffer.by_name[name], source.mesh.tp, r.param.stop)
            - whole_elements(buffer.by_name[name], source.mesh.tp, r.param.start)
            for name, r in ranges.items()
        )
        for ranges in owned
    )


def whole_elements(held: Held, tp: int, stop: int) -> int:
    """How many of the first ``stop`` elements of the local tensor, flattened, lie in segments that each rank holds."""
    placement = held.placement
    inner = prod(held.local_shape[placement.dim + 1 :])
    row = held.local_shape[placement.dim] * inner
    full, rest = divmod(stop, row)
    count = start = 0
    for segment in placement.segments:
        size = segment.local(tp) * inner
        if not segment.sharded:
            count += full * size + max(0, min(rest, start + size) - start)
        start += size
    return count


def exact_memory(
    spec: Spec, source: PlanSource, all_buffers: tuple[Buffer, ...], rows: tuple[MemoryRow, ...]
) -> tuple[MemoryRow, ...]:
    """``rows`` with the bytes of the live buffers, all padding included, for parameters, gradients and optimizer."""
    return tuple(_exact(spec, source, [b for b in all_buffers if b.pp_rank == row.pp_rank], row) for row in rows)


def _exact(spec: Spec, source: PlanSource, mine: list[Buffer], row: MemoryRow) -> MemoryRow:
    local = LocalSizes(source.mesh.tp, {n: o.out for n, o in source.placements.options.items()})
    frozen = sum(local.bytes(n) for n in _parameters_of_rank(source, row.pp_rank) if not n.meta["grad"])
    return replace(
        row,
        total=-1,
        parameters=frozen
        + _registered_bytes(source, row.pp_rank)
        + sum(b.layout.num_elements * b.dtype.itemsize for b in mine),
        gradients=sum(b.layout.num_elements * b.gradient_dtype.itemsize for b in mine),
        optimizer=sum(b.optimizer_bytes(spec.optimizer.name) for b in mine),
    )


def _registered_bytes(source: PlanSource, rank: int) -> int:
    """The model's own buffers and constants on each stage of a rank."""
    program, stages, local = source.program, source.stages, LocalSizes()
    return sum(
        local.bytes(program.node(name)) * sum(s % source.mesh.pp == rank for s in stages.parameter_stages[name])
        for name in (*program.buffers, *program.constants)
        if name in stages.parameter_stages
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
