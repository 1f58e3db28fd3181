"""The buffers, sums and exchanges of every rank, in one value of the plan that passes and runtime read.

A stage sends the live values at its end to the next stage, in local shapes, never as partial sums. The collectives of a
step over the gradient buffers, which start after its last backward has begun:

dp, dp-cp, edp       reduce-scatter of each bucket (zero 2 and 3: of each microbatch), all-gather of its parameters
                     (zero 3: planner.exchanges.collectives); zero 0: one all-reduce
tp, etp, embedding   all-reduce of each bucket's shard, if gradients are partial sums
replica              the same, if parameters are sharded within groups of dp
tp-dp, …             two all-to-alls of the updates of a bucket's matrices, if a rule updates them whole: to their home
                     ranks, and back (planner.sharding.homes)
dp, dp-cp            one all-reduce of the sums that a loss reads, if separate forwards count them
world                one all-reduce of [|g|², loss, rows of each expert, requests to stop, notes of each rank]

edp and etp are axes of experts, if these have their own; dp-cp replaces dp if cp > 1.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from passes.partition.type_changes import TypeChange, sent_type, type_changes
from passes.program.ops.sequence import over_data
from passes.program.program import BoundaryPlan
from passes.types.conversions import CollectivePlan
from passes.types.types import Placement
from planner.decisions import Decisions
from planner.mesh import Mesh
from planner.sharding import buckets
from planner.sharding.buffers import Buffer, buffers_at, buffers_of
from planner.sharding.homes import SENT_BYTES, MatrixHomes, exchanged_elements, homes_of
from planner.sharding.residency import Unit
from planner.spec.spec import Spec
from planner.updates import UpdateRules


@dataclass(frozen=True)
class Shards:
    """``changes`` of type and sent ``boundaries`` of each stage; ``buffers`` and exchanges ``at_step`` of each pp rank.

    ``buffers``: of ep rank 0. ``elsewhere``: returns the buffers of (pp rank, ep rank), if parameters belong to single
    experts, so that ep ranks hold different ones. ``reshards``: gathered weights are freed after each use, except the
    units ``kept``, by pp rank.
    """

    changes: tuple[tuple[TypeChange, ...], ...]
    boundaries: tuple[tuple[BoundaryPlan, ...], ...]
    buffers: tuple[Buffer, ...]
    at_step: tuple[CollectivePlan, ...]
    elsewhere: Callable[[int, int], tuple[Buffer, ...]] | None = None
    reshards: bool = True
    kept: tuple[frozenset[Unit], ...] = ()

    def kept_by(self, pp_rank: int) -> frozenset[Unit]:
        """Return the units that stay gathered from their first use in a step to its end, even if others are freed."""
        return self.kept[pp_rank] if self.kept else frozenset()

    def received(self, stage: int) -> tuple[BoundaryPlan, ...]:
        return self.boundaries[stage - 1] if stage else ()

    def sent(self, stage: int) -> tuple[BoundaryPlan, ...]:
        return self.boundaries[stage]

    def buffers_of_rank(self, pp_rank: int, ep_rank: int = 0) -> tuple[Buffer, ...]:
        if ep_rank and self.elsewhere is not None:
            return self.elsewhere(pp_rank, ep_rank)
        return tuple(buffer for buffer in self.buffers if buffer.pp_rank == pp_rank)

    def bucket_of(self, place: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """Return name → (buffer, bucket in it), on the rank at ``place``, of parameters that other ranks update too."""
        return {
            slot.name: (number, slot.bucket)
            for number, buffer in enumerate(self.buffers_of_rank(place["pp"], place["ep"]))
            for slot in buffer.layout.slots
            if buffer.layout.num_ranks > 1
        }

    def buffer_of(self, ep: int) -> dict[str, Buffer]:
        """Return name → buffer of every trainable parameter, on any rank."""
        ep_ranks = range(1 if self.elsewhere is None else ep)
        pp_ranks = sorted({buffer.pp_rank for buffer in self.buffers})
        found = [buffer for pp in pp_ranks for rank in ep_ranks for buffer in self.buffers_of_rank(pp, rank)]
        return {name: buffer for buffer in found if not buffer.is_frozen for name in buffer.by_name}


def decide_shards(spec: Spec, decisions: Decisions) -> Shards:
    """Decide every stage's changes of type and boundary, and every rank's buffers and their sums."""
    program, stages = decisions.program, decisions.stages
    buffers, zero = buffers_of(spec, decisions), spec.optimizer.planned_zero
    changes = tuple(type_changes(decisions.placements, stages, program, index) for index in range(stages.num_stages))
    are_alone = any(part.dim < 0 for part in decisions.expert_parts.values())
    return Shards(
        changes,
        tuple(boundary(decisions, index) for index in range(stages.num_stages)),
        buffers,
        (
            *sums_of_the_loss(decisions),
            *step_collectives(decisions.mesh, buffers, zero, decisions.load().num_figures, decisions.rules),
        ),
        partial(buffers_at, spec, decisions) if are_alone else None,
        spec.optimizer.reshard is not False,
    )


def boundary(decisions: Decisions, cut: int) -> tuple[BoundaryPlan, ...]:
    """Return the values that stage ``cut`` sends to stage ``cut + 1``; none before the first and after the last."""
    stages = decisions.stages
    if not 0 <= cut < stages.num_stages - 1:
        return ()
    placements, program = decisions.placements, decisions.program
    return tuple(value_at(decisions, n, sent_type(placements.of(program.node(n)))) for n in stages.live[cut])


def crossing(values: Sequence[BoundaryPlan], kind: str) -> list[BoundaryPlan]:
    """Return the values that cross a boundary forward ("F"), or those with gradients that cross it backward ("B")."""
    return [value for value in values if kind == "F" or value.requires_grad]


def one_way(boundaries: Sequence[Sequence[BoundaryPlan]]) -> list[int]:
    """Return the boundaries that no gradient crosses."""
    return [cut for cut, values in enumerate(boundaries) if not crossing(values, "B")]


def value_at(decisions: Decisions, name: str, placement: Placement) -> BoundaryPlan:
    """Return a value with its local shape and bytes on one rank under ``placement``."""
    node = decisions.program.node(name)
    value = node.meta["val"]
    shape = placement.local_shape(tuple(value.shape), decisions.mesh.tp)
    dtype = str(value.dtype).removeprefix("torch.")
    size = prod(shape) * value.element_size()
    return BoundaryPlan(name, shape, dtype, size, str(placement), bool(node.meta["grad"]))


SUMS = ("tp", "etp", "embedding", "replica")  # the order on all ranks, although they hold different buffers
# Notes that are summed with the norm: digest of the batch, busy seconds, working and total seconds in the pipeline,
# bytes of memory.
NOTES_OF_A_RANK = 5


def sums_of(buffer: Buffer, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of several ranks over which a buffer's gradients are summed after dp, in order.

    Chunks of one rank share a tied weight without an exchange.
    """
    is_shared = len({mesh.pp_rank_of(stage) for stage in buffer.tied_stages}) > 1
    return tuple(axis for axis in SUMS if axis in buffer.partial_over and (is_shared or axis != "embedding"))


def step_collectives(
    mesh: Mesh, all_buffers: tuple[Buffer, ...], zero: int, num_experts: int = 0, rules: UpdateRules | None = None
) -> tuple[CollectivePlan, ...]:
    """Return a row for each exchange at the end of a step; ``stage`` is the first stage of the pp rank.

    ``num_experts``: number of figures of experts that a step counts: rows of each, and dropped rows of each layer.
    """
    rows = [row for i, buffer in enumerate(all_buffers) for row in _of_buffer(mesh, zero >= 1, i, buffer)]
    for i, buffer in enumerate(all_buffers):
        homes = homes_of(buffer, mesh, rules or UpdateRules())
        rows += [] if homes is None or not homes.axis else _of_matrices(mesh, i, homes)
    if mesh.world_size > 1:
        where = "gradient norm and loss" + (", rows of each expert" if num_experts else "")
        notes = 1 + NOTES_OF_A_RANK * mesh.world_size  # requests to stop, then the notes of each rank
        size = (2 + num_experts + notes) * torch.float64.itemsize
        rows.append(_of_step("all_reduce", "world", where, size))
    return tuple(rows)


def sums_of_the_loss(decisions: Decisions) -> tuple[CollectivePlan, ...]:
    """Return a row for each pp rank that counts sums over the global batch before the first backward."""
    mesh, program, elements = decisions.mesh, decisions.program, Counter[int]()
    for node in program.graph.graph.find_nodes(op="call_function", target=over_data):
        for stage in range(decisions.stages.num_stages):
            if decisions.stages.runs_on(node.name, stage):
                elements[mesh.pp_rank_of(stage)] += node.meta["val"].numel()
    if decisions.terms.in_turn == 1 or mesh.size(mesh.data_axis) == 1:
        return ()
    what, size = "sums of the loss over the global batch", torch.float64.itemsize
    return tuple(_of_step("all_reduce", mesh.data_axis, what, n * size, pp) for pp, n in elements.items())


def _of_step(kind: str, axis: str, where: str, size: int, stage: int | None = None) -> CollectivePlan:
    return CollectivePlan(kind, axis, "step", where, size, count=1, per="step", stage=stage)


def _of_buffer(mesh: Mesh, sharded: bool, index: int, buffer: Buffer) -> Iterator[CollectivePlan]:
    over = buffer.reduced_over
    num_ranks = mesh.size(over)
    for bucket in buffer.layout.buckets if not buffer.is_frozen else ():
        place = f"optimizer.buffers.{index}.buckets.{bucket.index}   ({_contents(bucket)})"
        size = len(bucket.world) * buffer.gradient_dtype.itemsize
        if buffer.scatters:
            times = max(1, sum(mesh.pp_rank_of(stage) == buffer.pp_rank for stage in _stages_of(buffer, bucket)))
            held = mesh.stages_of(buffer.pp_rank)[0]
            yield CollectivePlan(
                "reduce_scatter", over, "backward", place, size, count=times, per="microbatch", stage=held
            )
        elif num_ranks > 1:
            yield _of_step("reduce_scatter" if sharded else "all_reduce", over, place, size, buffer.pp_rank)
        for axis in sums_of(buffer, mesh):
            size = _summed_elements(mesh, buffer, bucket, axis) * buffer.main_dtype.itemsize
            yield _of_step("all_reduce", axis, place, size, buffer.pp_rank)
        if num_ranks > 1 and sharded and not buffer.gathers:
            yield _of_step("all_gather", over, place, len(bucket.world) * buffer.dtype.itemsize, buffer.pp_rank)


def _stages_of(buffer: Buffer, bucket: buckets.Bucket) -> set[int]:
    """Return the stages that hold tied parameters of the bucket."""
    return {stage for slot in bucket.slots for stage in buffer.by_name[slot.name].tied_stages}


def _of_matrices(mesh: Mesh, index: int, homes: MatrixHomes) -> Iterator[CollectivePlan]:
    """Yield the exchanges of matrices; ``bytes`` are of the rank that sends most."""
    buffer = homes.buffer
    for bucket in buffer.layout.buckets:
        for what, elements in zip(
            ("to their homes", "back"), exchanged_elements(homes, bucket.index, mesh, buffer.pp_rank), strict=True
        ):
            count = len(homes.buckets[bucket.index])
            place = f"optimizer.buffers.{index}.buckets.{bucket.index}   ({count} matrices {what})"
            yield _of_step("all_to_all", homes.axis, place, elements * SENT_BYTES, buffer.pp_rank)


def _contents(bucket: buckets.Bucket) -> str:
    first, last = bucket.slots[0].name, bucket.slots[-1].name
    return f"gradients of {first}" if first == last else f"gradients of {len(bucket.slots)} parameters"


def _summed_elements(mesh: Mesh, buffer: Buffer, bucket: buckets.Bucket, axis: str) -> int:
    """Return the elements of a shard that are summed over ``axis``; over tp or etp, of parameters with replicated
    segments only these.
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
