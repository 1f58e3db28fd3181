"""Bytes on one rank of each pipeline rank, by category, before anything is allocated.

parameters, gradients   the buffers that the runtime allocates, padding and all; frozen parameters, and the model's own
                        buffers and constants
optimizer               two moments, or the values that another update rule keeps; a mean of the weights with
                        ``optimizer.ema``; a float32 main parameter and gradient if the buffers are less precise. Under
                        ZeRO-1 of this rank's shard alone

parameters, gradients     not sharded     ZeRO-1 over d ranks, bytes an element
half, half                    20          4 + 16/d
half, float32                 18          6 + 12/d
float32, float32              16          8 + 8/d

activations             saved tensors of all microbatches in flight at the peak (planner.saved,
                        planner.pipeline.ledger), and tensors that wait for a W: inputs of products with weights,
                        gradients of their results
logits                  the part of it after the last block, kept apart: final norm, head and loss
working                 other memory of the forward or backward that runs at that moment: values that are
                        read once more, gradients, insides of ops, gathered values
communication           messages between stages that are under way then
whole                   with zero 2 and 3: full gradients, and weights, of the blocks that a rank is at
                        (planner.cost.whole)
graph_buffers           the static inputs, outputs and gradients of CUDA graphs, all slots; of a full
                        iteration its messages too
slack                   of the allocator: ``SLACK`` of all that comes and goes (activations to whole); on a cluster at
                        least ``device.slack`` of all tensors (planner.cost.device_memory)
device                  if the cluster file has figures: of the driver's context and of collectives
                        (planner.cost.device_memory)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, prod

from passes.errors import require
from passes.pieces import CompiledPiece, Piece
from passes.program.ops.aten import value_bytes
from planner.cost.cut.ops import puts_aside
from planner.cost.fused_saves import with_fused_saves
from planner.cost.let_go import let_go_of
from planner.cost.liveness import StageMemory, stage_memory
from planner.cost.whole import whole_bytes
from planner.decisions import Decisions
from planner.fold import Fold, stages_of
from planner.mesh import Mesh
from planner.pipeline.actions import Order
from planner.pipeline.ledger import Peak, StageBytes, UnderWay, peak
from planner.pipeline.links import Message, received_by
from planner.pipeline.schedule import SchedulePlan
from planner.regions.static_memory import GraphSlots
from planner.saved.lowered import Lowered
from planner.saved.trace import StageTrace
from planner.sharding.homes import homes_of
from planner.sharding.parameters import parameters_of_rank
from planner.sharding.shards import Shards

SLACK = 0.05  # blocks that the allocator rounds up or cannot join
_SUMMED = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "graph_buffers",
    "logits",
    "working",
    "communication",
    "whole",
    "slack",
    "device",
)


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes on one rank of ``pp_rank``. ``total`` is their sum; left out, it is filled in.

    ``peak``: the action at which they are the most, such as ``F5.1``: forward of microbatch 5 on chunk 1.
    ``of_microbatch``: bytes that autograd saves of one microbatch, chunk by chunk.
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
        total = sum(getattr(self, part) for part in _SUMMED)
        if self.total == -1:
            object.__setattr__(self, "total", total)
        require(self.total == total, f"memory of pp rank {self.pp_rank}: {self.total} is not the sum {total}")


def memory_rows(
    lowered: Lowered,
    schedule: SchedulePlan,
    slots: Sequence[GraphSlots] = (),
    recomputed: Sequence[Piece] = (),
    compiled: Sequence[CompiledPiece] = (),
) -> tuple[MemoryRow, ...]:
    """One row for each pp rank. ``recomputed``: the pieces that are freed and recomputed."""
    decisions, shards = lowered.decisions, lowered.shards
    after, stages = frozenset(after_blocks(decisions)), list[StageMemory]()
    for index in range(decisions.stages.num_stages):
        trace = with_fused_saves(lowered.trace(index), compiled, recomputed)
        later = waiting_calls(trace) if schedule.has_weights else frozenset[int]()
        stages.append(stage_memory(trace, after, let_go_of(trace, recomputed), later))
    stages = shared_once(stages, decisions.mesh)
    static, orders, fold = Counter[int](), schedule.actions, decisions.mesh.fold
    for row in slots:
        static[row.pp_rank] += row.bytes
    standing = {row.pp_rank for row in slots if row.message_bytes}
    peaks = [_peak(orders, rank, stages, shards, fold, rank in standing) for rank in range(decisions.mesh.pp)]
    whole = whole_bytes(lowered, schedule)
    return tuple(
        _row(decisions, shards, rank, peak, stages, (static[rank], whole[rank])) for rank, peak in enumerate(peaks)
    )


def _peak(
    orders: Sequence[Order], rank: int, stages: Sequence[StageMemory], shards: Shards, fold: Fold, stands_still: bool
) -> Peak:
    """``orders``: the actions of every rank; ``stages``: of every stage. ``stands_still``: messages lie in buffers that
    are counted elsewhere, received values too.
    """
    pp, count = len(orders), len(stages)
    own = [(stages[stage], received_by("F", stage, 0)) for stage in stages_of(rank, pp, count, fold)]
    own = [m.without(m.received) if stands_still and into.crosses(count, pp, fold) else m for m, into in own]
    chunks = [StageBytes(m.kept, m.logits, m.forward, m.backward, m.aside) for m in own]
    if stands_still:
        return peak(orders[rank], chunks)

    def ahead(message: Message) -> int:
        return sum(b.bytes for b in shards.sent(message.boundary) if message.kind == "F" or b.requires_grad)

    def sent(message: Message) -> int:
        return stages[message.boundary].sent if message.kind == "F" else ahead(message)

    return peak(orders[rank], chunks, UnderWay(orders, rank, count, fold, ahead, sent))


def shared_once(stages: Sequence[StageMemory], mesh: Mesh) -> list[StageMemory]:
    """A stage that follows another on the same rank receives its tensors, no copies: kept bytes of both count once."""
    found = list(stages[:1])
    for index, (before, stage) in enumerate(pairwise(stages), 1):
        copies = received_by("F", index, 0).crosses(len(stages), mesh.pp, mesh.fold)
        found.append(stage if copies else stage.without(before.passed_on))
    return found


def waiting_calls(trace: StageTrace) -> frozenset[int]:
    """Numbers of the calls with weight gradients that wait for a W. Calls inside CUDA graphs do not wait but are
    counted, so this is an upper bound.
    """
    return frozenset(at for at, call in enumerate(trace.calls) if puts_aside(trace, call))


def _row(
    decisions: Decisions,
    shards: Shards,
    rank: int,
    peak: Peak,
    stages: Sequence[StageMemory],
    beside: tuple[int, int],
) -> MemoryRow:
    """``beside``: bytes of static graph buffers, and of full weights and gradients."""
    static, whole = beside
    buffers = shards.buffers_of_rank(rank)
    held = parameters_of_rank(decisions, rank)
    laid_out = {name for buffer in buffers for name in buffer.by_name}
    frozen = sum(prod(p.shape) * p.dtype.itemsize for p in held if p.fqn not in laid_out)
    own = sum(b.parameter_bytes for b in buffers)
    # nothing of a microbatch is held then
    more = max(0, update_bytes(decisions, shards, rank) - int(peak.total) - whole)
    return MemoryRow(
        rank,
        parameters=frozen + registered_bytes(decisions, rank) + own,
        gradients=sum(b.gradient_bytes for b in buffers),
        optimizer=sum(b.optimizer_bytes for b in buffers),
        activations=int(peak.kept - peak.logits),
        graph_buffers=static,
        logits=int(peak.logits),
        working=int(peak.working) + more,
        communication=int(peak.messages),
        whole=whole,
        slack=ceil(SLACK * (peak.total + more + whole)),
        peak="update" if more else str(peak.action or ""),
        of_microbatch=tuple(stages[stage].kept for stage in decisions.mesh.stages_of(rank)),
    )


def update_bytes(decisions: Decisions, shards: Shards, rank: int) -> int:
    """The most bytes at once that the update of a rank's weights needs beside them."""
    buffers = shards.buffers_of_rank(rank)
    homes = [homes_of(buffer, decisions.mesh, decisions.rules) for buffer in buffers]
    of_matrices = [home.update_bytes for home in homes if home is not None]
    return max(of_matrices, default=0)


def after_blocks(decisions: Decisions) -> list[str]:
    """The calls that stand after the last block: a final norm, the head, the loss. None if there are no blocks."""
    block_of = decisions.blocks.block_of()
    calls = [node.name for node in decisions.program.graph.graph.nodes if node.op == "call_function"]
    last = max((at for at, name in enumerate(calls) if name in block_of), default=len(calls))
    return calls[last + 1 :]


def registered_bytes(decisions: Decisions, rank: int) -> int:
    """The model's own buffers and constants on each stage of a rank."""
    program, stages, own = decisions.program, decisions.stages, decisions.mesh.stages_of(rank)
    return sum(
        value_bytes(program.node(name)) * sum(stage in stages.parameter_stages[name] for stage in own)
        for name in (*program.buffers, *program.constants)
        if name in stages.parameter_stages
    )
