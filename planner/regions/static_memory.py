"""The slots of a rank's CUDA graphs: the captures, replays and static bytes of each chunk.

    graphs    = Σ over regions of the chunk   (forward, and backward if it has one) · slots
    replays   = Σ over regions of the chunk   (forward, and backward if it has one) · microbatches
    bytes     = Σ over regions of the chunk   (inputs + outputs + gradients of one slot) · slots

A chunk has as many slots as microbatches in flight. make_graphed_callables of Transformer Engine captures graphs for
each microbatch, and regions with one signature share a queue of static inputs. A full iteration is one graph, replayed
once per step; its static memory is the batch, the denominators, and the buffers of messages between stages.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from passes.pieces import Region
from passes.program.program import BoundaryPlan
from planner.decisions import Decisions
from planner.pipeline.message_slots import message_slots, order_by_microbatch, ring_sizes, slots_by_kind
from planner.pipeline.schedule import Order, SchedulePlan
from planner.sharding.shards import boundary, crossing, one_way
from planner.spec.sections import FULL_ITERATION, CudaGraphsSpec

Signature = tuple[tuple[tuple[int, ...], str], ...]


@dataclass(frozen=True, slots=True)
class GraphSlots:
    """The row of the graphs of one chunk of a pp rank, or of the whole rank if ``chunk`` is None.

    ``num_regions``: captured regions; ``num_replays``: per step; bytes: of all slots on one rank; ``slots``: the slot
    of each microbatch.
    """

    pp_rank: int
    chunk: int | None
    num_regions: int
    num_slots: int
    num_graphs: int
    num_replays: int
    input_bytes: int = 0
    output_bytes: int = 0
    gradient_bytes: int = 0
    slots: tuple[int, ...] = ()
    message_bytes: int = 0  # of a full iteration: messages between stages

    @property
    def bytes(self) -> int:
        return self.input_bytes + self.output_bytes + self.gradient_bytes + self.message_bytes


def decide_slots(
    asked: CudaGraphsSpec, decisions: Decisions, schedule: SchedulePlan, regions: Sequence[Region]
) -> tuple[GraphSlots, ...]:
    """Return a row for each chunk of each pp rank; none without graphs."""
    if asked.impl == "none":
        return ()
    if FULL_ITERATION in asked.scope:
        return tuple(_whole_iteration(decisions, schedule, rank) for rank in range(decisions.mesh.pp))
    rows = list[GraphSlots]()
    captured = [region for region in regions if not region.refused]
    for rank, order in enumerate(schedule.orders):
        chunks = [[region for region in captured if region.stage == stage] for stage in decisions.mesh.stages_of(rank)]
        by_microbatch = asked.impl == "transformer_engine"
        rows += _by_microbatch(rank, order, chunks) if by_microbatch else _by_slot(rank, order, chunks)
    return tuple(rows)


def slots_of(order: Order) -> dict[tuple[int, int], int]:
    """Return (chunk, microbatch) → the slot in which all regions of the chunk run it; chunks share no slot."""
    slots = slots_by_kind(order, {action.chunk: [action.chunk] for action in order})
    return {(chunk, m): slot for (m, chunk, _), slot in slots.items()}


# ---- regions


def _by_slot(rank: int, order: Order, chunks: Sequence[Sequence[Region]]) -> list[GraphSlots]:
    """Return the rows if each region has its own graphs and static memory for each slot of its chunk."""
    slots = slots_of(order)
    rows = []
    for chunk, regions in enumerate(chunks):
        mine = tuple(slot for (c, _), slot in sorted(slots.items()) if c == chunk)
        graphs, count = sum(region.num_graphs for region in regions), len(set(mine))
        inputs, outputs, gradients = (count * size for size in _sizes(regions))
        sizes = (len(regions), count, graphs * count, graphs * len(mine))
        rows.append(GraphSlots(rank, chunk, *sizes, inputs, outputs, gradients, mine))
    return rows


def _by_microbatch(rank: int, order: Order, chunks: Sequence[Sequence[Region]]) -> list[GraphSlots]:
    """Return the rows if each microbatch has its own graphs, and static inputs are shared by signature: their bytes
    are in the row of the chunk that uses them first."""
    taken = slots_by_kind(order, [[signature(region.inputs.values()) for region in regions] for regions in chunks])
    first: dict[int, Region] = {}
    for (_, chunk, index), buffer in taken.items():
        first.setdefault(buffer, chunks[chunk][index])
    shared = Counter[int]()
    for region in first.values():
        shared[region.index] += _sizes([region])[0]
    rows = []
    for row, regions in zip(_by_slot(rank, order, chunks), chunks, strict=True):
        inputs = sum(shared[region.index] for region in regions)
        graphs = len(regions) * sum(action.chunk == row.chunk for action in order_by_microbatch(order))
        rows.append(replace(row, num_graphs=graphs, input_bytes=inputs))
    return rows


def _sizes(regions: Iterable[Region]) -> tuple[int, int, int]:
    """Return the bytes of one slot: inputs, outputs, gradients."""
    inputs = outputs = total = 0
    for region in regions:
        inputs += sum(value.bytes for value in region.inputs.values())
        outputs += sum(value.bytes for value in region.outputs.values())
        total += region.static_bytes
    return inputs, outputs, total - inputs - outputs


def signature(inputs: Iterable[BoundaryPlan]) -> Signature:
    """Return the shapes and dtypes that regions must have in common to share static inputs."""
    return tuple((tuple(value.shape), value.dtype) for value in inputs)


# ---- a full iteration


def iteration_input_bytes(decisions: Decisions, schedule: SchedulePlan, rank: int) -> int:
    """Return the bytes of the static inputs of a full-iteration graph on a pp rank, without weights: the batch tensors
    of every microbatch that its stages read, and the denominators of its losses (float64).
    """
    program, read, own = decisions.program, decisions.stages.parameter_stages, decisions.mesh.stages_of(rank)
    here = [name for name, stages in read.items() if not set(own).isdisjoint(stages)]
    batch = [program.node(name).meta["val"] for name in here if name in program.inputs]
    counts = [name for name in here if name in decisions.terms.denominators]
    microbatch = sum(value.numel() * value.element_size() for value in batch)
    return microbatch * schedule.num_microbatches + len(counts) * torch.float64.itemsize


def static_message_bytes(decisions: Decisions, schedule: SchedulePlan, rank: int) -> int:
    """Return the bytes of the buffers that a rank's messages share."""
    num_stages = decisions.stages.num_stages
    boundaries = [boundary(decisions, cut) for cut in range(num_stages - 1)]
    slots = message_slots(schedule.orders, rank, num_stages, decisions.mesh.fold, one_way(boundaries))
    return sum(
        count * sum(value.bytes for value in crossing(boundaries[ring.boundary], ring.kind))
        for ring, count in ring_sizes(slots).items()
    )


def _whole_iteration(decisions: Decisions, schedule: SchedulePlan, rank: int) -> GraphSlots:
    inputs = iteration_input_bytes(decisions, schedule, rank)
    messages = static_message_bytes(decisions, schedule, rank)
    return GraphSlots(rank, None, 0, 1, 1, 1, input_bytes=inputs, message_bytes=messages)
