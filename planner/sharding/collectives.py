"""The collectives of a step over the gradient buffers, after its last backward has begun.

dp, dp-cp, edp       reduce-scatter of each bucket (zero 2 and 3: of each microbatch), all-gather of its parameters
                     (zero 3: planner.exchanges.weights); zero 0: one all-reduce
tp, etp, embedding   all-reduce of each bucket's shard, if gradients are partial sums
replica              the same, if parameters are in shards within groups of dp
tp-dp, …             two all-to-alls of the updates of a bucket's matrices, if a rule updates them whole: to their home
                     ranks, and back (planner.sharding.homes)
dp, dp-cp            one all-reduce of the sums that a loss reads, if forwards of their own count them
world                one all-reduce of [|g|², loss, rows of each expert, requests to stop, notes of each rank]

edp and etp are those of experts that have axes of their own; dp-cp takes the place of dp if cp > 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from passes.program.ops.over_data import over_data
from passes.types.collectives import CollectivePlan
from planner.decisions import Decisions
from planner.mesh import Mesh
from planner.sharding import buckets
from planner.sharding.buffers import Buffer
from planner.sharding.homes import SENT_BYTES, Homes, exchanged_elements, homes_of
from planner.updates.rules import UpdateRules

SUMS = ("tp", "etp", "embedding", "replica")  # in this order, which all ranks share though they hold different buffers
# Digest of the batch, busy seconds, seconds at work in the pipeline and in it at all, bytes of memory; with the norm.
NOTES_OF_A_RANK = 5


def sums_of(buffer: Buffer, mesh: Mesh) -> tuple[str, ...]:
    """The groups with another rank over which a buffer's gradients are summed after dp, first to last.

    Chunks of one rank share a tied weight without an exchange.
    """
    is_shared = len({mesh.pp_rank_of(stage) for stage in buffer.tied_stages}) > 1
    return tuple(axis for axis in SUMS if axis in buffer.partial_over and (is_shared or axis != "embedding"))


def step_collectives(
    mesh: Mesh, all_buffers: tuple[Buffer, ...], zero: int, num_experts: int = 0, rules: UpdateRules | None = None
) -> tuple[CollectivePlan, ...]:
    """A row for each exchange at the end of a step; ``stage`` is the first stage of the pp rank.

    ``num_experts``: of all layers together, if a step counts their rows, and layers that count dropped rows.
    """
    rows = [row for i, buffer in enumerate(all_buffers) for row in _of_buffer(mesh, zero >= 1, i, buffer)]
    for i, buffer in enumerate(all_buffers):
        homes = homes_of(buffer, mesh, rules or UpdateRules())
        rows += [] if homes is None or not homes.axis else _of_matrices(mesh, i, homes)
    if mesh.world_size > 1:
        where = "gradient norm and loss" + (", rows of each expert" if num_experts else "")
        notes = 1 + NOTES_OF_A_RANK * mesh.world_size  # asked to stop, then those of each rank
        size = (2 + num_experts + notes) * torch.float64.itemsize
        rows.append(CollectivePlan("all_reduce", "world", "step", where, size, 1, "step"))
    return tuple(rows)


def sums_of_the_loss(decisions: Decisions) -> tuple[CollectivePlan, ...]:
    """A row for each pp rank with sums over the global batch that its ranks count before the first backward."""
    mesh, program, elements = decisions.mesh, decisions.program, Counter[int]()
    for node in program.graph.graph.find_nodes(op="call_function", target=over_data):
        for stage in range(decisions.stages.num_stages):
            if decisions.stages.runs_on(node.name, stage):
                elements[mesh.pp_rank_of(stage)] += node.meta["val"].numel()
    if decisions.terms.in_turn == 1 or mesh.size(mesh.data_axis) == 1:
        return ()
    what, size = "sums of the loss over the global batch", torch.float64.itemsize
    axis = mesh.data_axis
    return tuple(
        CollectivePlan("all_reduce", axis, "step", what, n * size, 1, "step", pp) for pp, n in elements.items()
    )


def _of_buffer(mesh: Mesh, sharded: bool, index: int, buffer: Buffer) -> Iterator[CollectivePlan]:
    over = buffer.reduced_over
    num_ranks = mesh.size(over)
    for bucket in buffer.layout.buckets if not buffer.is_frozen else ():
        place = f"optimizer.buffers.{index}.buckets.{bucket.index}   ({_contents(bucket)})"

        def row(kind: str, axis: str, size: int, place: str = place) -> CollectivePlan:
            return CollectivePlan(kind, axis, "step", place, size, 1, "step", buffer.pp_rank)

        size = len(bucket.world) * buffer.gradient_dtype.itemsize
        if buffer.scatters:
            times = max(1, sum(mesh.pp_rank_of(stage) == buffer.pp_rank for stage in _stages_of(buffer, bucket)))
            held = mesh.stages_of(buffer.pp_rank)[0]
            yield CollectivePlan("reduce_scatter", over, "backward", place, size, times, "microbatch", held)
        elif num_ranks > 1:
            yield row("reduce_scatter" if sharded else "all_reduce", over, size)
        for axis in sums_of(buffer, mesh):
            yield row("all_reduce", axis, _summed_elements(mesh, buffer, bucket, axis) * buffer.main_dtype.itemsize)
        if num_ranks > 1 and sharded and not buffer.gathers:
            yield row("all_gather", over, len(bucket.world) * buffer.dtype.itemsize)


def _stages_of(buffer: Buffer, bucket: buckets.Bucket) -> set[int]:
    """The stages that hold a parameter of the bucket, if they are several."""
    return {stage for slot in bucket.slots for stage in buffer.by_name[slot.name].tied_stages}


def _of_matrices(mesh: Mesh, index: int, homes: Homes) -> Iterator[CollectivePlan]:
    """``bytes``: of the rank that sends most."""
    buffer = homes.buffer
    for bucket in buffer.layout.buckets:
        for what, elements in zip(
            ("to their homes", "back"), exchanged_elements(homes, bucket.index, mesh, buffer.pp_rank), strict=True
        ):
            count = len(homes.buckets[bucket.index])
            place = f"optimizer.buffers.{index}.buckets.{bucket.index}   ({count} matrices {what})"
            size = elements * SENT_BYTES
            yield CollectivePlan("all_to_all", homes.axis, "step", place, size, 1, "step", buffer.pp_rank)


def _contents(bucket: buckets.Bucket) -> str:
    first, last = bucket.slots[0].name, bucket.slots[-1].name
    return f"gradients of {first}" if first == last else f"gradients of {len(bucket.slots)} parameters"


def _summed_elements(mesh: Mesh, buffer: Buffer, bucket: buckets.Bucket, axis: str) -> int:
    """Elements of a shard that are added over ``axis``; of parameters with replicated segments over tp or etp only
    those.
    """
    num_shards, size = buffer.layout.num_ranks, mesh.size(buffer.axis)
    if axis != buffer.axis or not buffer.has_whole_segment:
        return len(bucket.world) // num_shards
    owned = (bucket.owned_ranges(rank, num_shards) for rank in range(num_shards))
    return max(
        sum(
            buffer.by_name[name].num_whole_elements(size, r.param.stop)
            - buffer.by_name[name].num_whole_elements(size, r.param.start)
            for name, r in ranges.items()
        )
        for ranges in owned
    )
