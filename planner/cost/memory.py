"""Predicted bytes on one rank of each pp rank, by category.

parameters, gradients   the buffers that the runtime allocates, with padding; frozen parameters, and the model's own
                        buffers and constants
optimizer               two moments, or the state of another update rule; a mean of the weights with ``optimizer.ema``;
                        float32 main parameters and gradients if the buffers are less precise. With ZeRO-1, of this
                        rank's shard alone

parameters, gradients     not sharded     ZeRO-1 over d ranks, bytes an element
half, half                    20          4 + 16/d
half, float32                 18          6 + 12/d
float32, float32              16          8 + 8/d

activations             saved tensors of all microbatches in flight at the peak (planner.trace,
                        planner.pipeline.ledger), and tensors that are kept for a W: inputs of products with weights,
                        gradients of their results
logits                  saved tensors after the last block, listed separately: final norm, head and loss
working                 other memory of the forward or backward at the peak: temporary values, gradients, internal
                        tensors of ops, gathered values
communication           messages between stages at that moment
whole                   with zero 2 and 3: full gradients, and weights, of the blocks that are running
                        (planner.cost.whole)
graph_buffers           the static inputs, outputs and gradients of CUDA graphs, for all slots; for a full-iteration
                        graph also the messages
slack                   of the allocator: ``SLACK`` of all temporary memory (activations to whole); on a cluster at
                        least ``device.slack`` of all tensors, because permanent tensors fragment memory too
device                  if the cluster file has these figures: the context of the driver and its libraries, and a
                        communicator for each process group of the rank, by the outermost link that it crosses. Groups:
                        all ranks; each axis, with dp-cp, and axes of experts if their ranks differ; further axes over
                        which its buffers are exchanged; each neighbour in the pipeline, by direction

NCCL allocates buffers for each channel and neighbour of a communicator, even if nothing is sent.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, prod
from typing import NamedTuple

from passes.errors import require
from passes.program.ops.aten import value_bytes
from planner.cluster.cluster import Cluster
from planner.cluster.links import level_between, outermost
from planner.cost.cut.fused import edited
from planner.cost.cut.ops import waiting_calls
from planner.cost.liveness import after_blocks, walked
from planner.cost.whole import whole_bytes
from planner.decisions import Decisions
from planner.fold import Fold, stages_of
from planner.mesh import EXPERT_AXES, OF_WEIGHTS, REPLICA, SHARD, Mesh
from planner.pipeline.actions import Order
from planner.pipeline.ledger import Peak, StageBytes, peak, under_way
from planner.pipeline.links import Message, RankMessages, links, received_by
from planner.pipeline.schedule import SchedulePlan
from planner.regions.static_memory import GraphSlots
from planner.sharding.buffers import Buffer
from planner.sharding.homes import homes_of, shared_over
from planner.sharding.parameters import parameters_of_rank
from planner.sharding.shards import Shards, sums_of
from planner.spec.update_rules import MATRIX_RULES
from planner.trace.lowered import Lowered

SLACK = 0.05  # for blocks that the allocator rounds up or cannot merge
LASTING = ("parameters", "gradients", "optimizer")
PARTS = (*LASTING, "activations", "logits", "working", "communication", "whole", "graph_buffers", "slack", "device")


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes on one rank of ``pp_rank``. ``total``: their sum, filled in by default.

    ``peak``: the action with the most bytes, such as ``F5.1``: forward of microbatch 5 on chunk 1. ``of_microbatch``:
    saved bytes of one microbatch, by chunk.
    """

    pp_rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    graph_buffers: int = 0
    total: int = -1
    logits: int = 0
    working: int = 0
    communication: int = 0
    whole: int = 0
    slack: int = 0
    device: int = 0
    peak: str = ""
    of_microbatch: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        total = sum(getattr(self, part) for part in PARTS)
        if self.total == -1:
            object.__setattr__(self, "total", total)
        require(self.total == total, f"memory of pp rank {self.pp_rank}: {self.total} is not the sum {total}")


def memory_rows(
    lowered: Lowered, schedule: SchedulePlan, slots: Sequence[GraphSlots], cluster: Cluster | None
) -> tuple[MemoryRow, ...]:
    """Return one row for each pp rank, on a device of ``cluster``."""
    decisions, shards = lowered.decisions, lowered.shards
    after, stages = frozenset(after_blocks(decisions)), list[StageBytes]()
    for index in range(decisions.stages.num_stages):
        trace = edited(lowered, index)
        later = waiting_calls(trace) if schedule.has_weights else frozenset[int]()
        stages.append(walked(trace, after, later).bytes)
    stages = shared_once(stages, decisions.mesh)
    static, orders, fold = Counter[int](), schedule.orders, decisions.mesh.fold
    for row in slots:
        static[row.pp_rank] += row.bytes
    standing = {row.pp_rank for row in slots if row.message_bytes}
    peaks = [_peak(orders, rank, stages, shards, fold, rank in standing) for rank in range(decisions.mesh.pp)]
    whole = whole_bytes(lowered, schedule)
    rows = [
        row_of(
            rank,
            at,
            _lasting(decisions, shards, rank, full),
            (stages[stage].kept for stage in decisions.mesh.stages_of(rank)),
            static=static[rank],
            update=update_bytes(decisions, shards, rank),
        )
        for rank, (at, full) in enumerate(zip(peaks, whole, strict=True))
    ]
    return on_device(rows, decisions.mesh, cluster, shards.buffers)


def _peak(
    orders: Sequence[Order], rank: int, stages: Sequence[StageBytes], shards: Shards, fold: Fold, stands_still: bool
) -> Peak:
    """Return the peak of ``rank``. ``orders`` of all ranks, ``stages``: bytes of all stages. ``stands_still``: messages
    and received values are in static buffers, which are counted elsewhere.
    """
    pp, count = len(orders), len(stages)
    own = [(stages[stage], received_by("F", stage, 0)) for stage in stages_of(rank, pp, count, fold)]
    chunks = [m.without(m.received) if stands_still and into.crosses(count, pp, fold) else m for m, into in own]
    if stands_still:
        return peak(orders[rank], chunks)

    def ahead(message: Message) -> int:
        return sum(b.bytes for b in shards.sent(message.boundary) if message.kind == "F" or b.requires_grad)

    def sent(message: Message) -> int:
        return int(stages[message.boundary].sent) if message.kind == "F" else ahead(message)

    return peak(orders[rank], chunks, under_way(RankMessages(orders, rank, count, fold), ahead, sent))


def shared_once(stages: Sequence[StageBytes], mesh: Mesh) -> list[StageBytes]:
    """Count saved tensors once if two consecutive stages are on one rank: the later one receives no copies."""
    counted = list(stages[:1])
    for index, (before, stage) in enumerate(pairwise(stages), 1):
        copies = received_by("F", index, 0).crosses(len(stages), mesh.pp, mesh.fold)
        counted.append(stage if copies else stage.without(before.passed_on))
    return counted


class Lasting(NamedTuple):
    """Permanent bytes of a rank; ``whole``: peak bytes of full weights and gradients, if ranks keep shards of them."""

    parameters: int
    gradients: int
    optimizer: int
    whole: int


def row_of(
    rank: int, at: Peak, lasting: Lasting, kept: Iterable[float], *, static: int = 0, update: int = 0
) -> MemoryRow:
    """Return the memory row of a pp rank. ``kept``: saved bytes of a microbatch, by chunk; ``static``: graph buffers;
    ``update``: temporary bytes of the optimizer update, when no microbatch is in flight.
    """
    passing = round(at.total) + lasting.whole
    more = max(0, update - passing)
    return MemoryRow(
        rank,
        *lasting[:3],
        activations=round(at.kept - at.logits),
        graph_buffers=static,
        logits=round(at.logits),
        working=round(at.working) + more,
        communication=round(at.messages),
        whole=lasting.whole,
        slack=ceil(SLACK * (passing + more)),
        peak="update" if more else str(at.action or ""),
        of_microbatch=tuple(map(round, kept)),
    )


def _lasting(decisions: Decisions, shards: Shards, rank: int, whole: int) -> Lasting:
    buffers, local = shards.buffers_of_rank(rank), parameters_of_rank(decisions, rank)
    laid_out = {name for buffer in buffers for name in buffer.by_name}
    frozen = sum(prod(p.shape) * p.dtype.itemsize for p in local if p.fqn not in laid_out)
    parameters = frozen + registered_bytes(decisions, rank) + sum(b.parameter_bytes for b in buffers)
    gradients, optimizer = (sum(getattr(b, part) for b in buffers) for part in ("gradient_bytes", "optimizer_bytes"))
    return Lasting(parameters, gradients, optimizer, whole)


def update_bytes(decisions: Decisions, shards: Shards, rank: int) -> int:
    """Return the peak of temporary bytes in the update of a rank's weights."""
    buffers = shards.buffers_of_rank(rank)
    homes = [homes_of(buffer, decisions.mesh, decisions.rules) for buffer in buffers]
    of_matrices = [home.update_bytes for home in homes if home is not None]
    return max(of_matrices, default=0)


def registered_bytes(decisions: Decisions, rank: int) -> int:
    """Return the bytes of the model's own buffers and constants on the stages of a rank."""
    program, stages, own = decisions.program, decisions.stages, decisions.mesh.stages_of(rank)
    return sum(
        value_bytes(program.node(name)) * sum(stage in stages.parameter_stages[name] for stage in own)
        for name in (*program.buffers, *program.constants)
        if name in stages.parameter_stages
    )


_TIED = "embedding"


def device_bytes(mesh: Mesh, cluster: Cluster, pp_rank: int = 0, further: Collection[str] = ()) -> int:
    """Return the device bytes of one rank of ``pp_rank``. ``further``: axes over which its buffers are exchanged."""
    own = _axes_of_groups(mesh)
    axes = (*own, *sorted({*further} - {*own, *EXPERT_AXES}))
    groups = ("pp" if axis.startswith(_TIED) else axis.removesuffix(OF_WEIGHTS) for axis in axes)
    reached = (outermost(mesh, axis, cluster) for axis in groups)
    ends = (ranks for pp_ranks, ranks in _links_of_pipeline(mesh) if pp_rank in pp_ranks)
    levels = [level for level in reached if level is not None] + [level_between(*pair, cluster) for pair in ends]
    return (cluster.device.context or 0) + sum(cluster.links[level].communicator or 0 for level in levels)


@lru_cache(maxsize=1 << 12)
def _axes_of_groups(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes with a process group; an expert axis with the ranks of a dense axis shares that group."""
    dense = {"etp": "tp", "edp": mesh.data_axis}
    experts = EXPERT_AXES if mesh.has_expert_axes else {}
    ranks = {axis: mesh.expert.group_of(token, 0) for axis, token in experts.items()}
    apart = [axis for axis in ranks if axis not in dense or mesh.dense.group_of(dense[axis], 0) != ranks[axis]]
    return ("world", "tp", "dp", *(("cp", "dp-cp") if mesh.cp > 1 else ()), *apart)


@lru_cache(maxsize=1 << 12)
def _links_of_pipeline(mesh: Mesh) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
    """Return for each link of a pipeline its two pp ranks, and the first global rank of each."""
    firsts = [mesh.rank_of(pp=rank) for rank in range(mesh.pp)]
    return tuple(((a, b), (firsts[a], firsts[b])) for a, b, _ in links(mesh.pp, mesh.vpp, mesh.fold))


def exchange_axes(mesh: Mesh, over: str, tied: str | None, *, gathers: bool, matrices: str) -> set[str]:
    """Return the axes over which a buffer is exchanged. ``over``: of its gradient reduction; ``tied``: the stages that
    share it, or None; ``matrices``: the axis that shares its matrix updates, or ""."""
    axes = {over, *([over + OF_WEIGHTS] if gathers else ()), *((SHARD, REPLICA) if mesh.replica > 1 else ())}
    return axes | ({_TIED + tied} if tied is not None else set()) | ({matrices} if matrices else set())


def on_device(
    rows: Sequence[MemoryRow], mesh: Mesh, cluster: Cluster | None, buffers: Iterable[Buffer] = ()
) -> tuple[MemoryRow, ...]:
    """Return ``rows`` with device bytes and slack; unchanged without a cluster. ``buffers``: of all pp ranks."""
    return tuple(rows) if cluster is None else with_axes(rows, mesh, cluster, _axes_of_buffers(buffers, mesh))


def with_axes(
    rows: Sequence[MemoryRow], mesh: Mesh, cluster: Cluster, further: Sequence[Collection[str]]
) -> tuple[MemoryRow, ...]:
    """Return ``rows`` with device bytes and slack. ``further``: by pp rank, the axes that its buffers use."""
    share, complete = cluster.device.slack_share, []
    of_rank = [device_bytes(mesh, cluster, rank, axes) for rank, axes in enumerate(further)]
    for row in rows:
        tensors, device = row.total - row.slack, of_rank[row.pp_rank]
        slack = max(row.slack, ceil(share * tensors))
        complete.append(replace(row, device=device, slack=slack, total=tensors + slack + device))
    return tuple(complete)


def _axes_of_buffers(buffers: Iterable[Buffer], mesh: Mesh) -> list[set[str]]:
    """Return, by pp rank, the axes over which its buffers are reduced, gathered or updated."""
    axes: list[set[str]] = [set() for _ in range(mesh.pp)]
    for b in buffers:
        matrices = b.rule in MATRIX_RULES and shared_over(b.parameters[0], mesh, sharded=b.layout.num_ranks > 1)
        tied = str(b.tied_stages) if _TIED in sums_of(b, mesh) else None
        axes[b.pp_rank] |= exchange_axes(mesh, b.reduced_over, tied, gathers=b.gathers, matrices=matrices or "")
    return axes
