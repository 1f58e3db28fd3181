"""Bytes of full weights and gradients on one rank while it needs them, if ranks keep shards of them (zero 2 and 3).

weights     the most that its moves make whole at once (planner.exchanges.weights)
gradients   a bucket fills from the backward of its last reader to that of its first; then its sums are under way until
            those of the next bucket begin. If gradients wait for a W of the schedule, all of a rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.decisions import Decisions
from planner.exchanges.weights import gathered_weights
from planner.pipeline.schedule import SchedulePlan
from planner.saved.lowered import Lowered
from planner.sharding.buffers import Buffer
from planner.sharding.parameters import parameters_of_rank


@dataclass(frozen=True, slots=True)
class Filling:
    """A bucket in the backward of a stage: its bytes, and the positions of its first and its last reader in the order
    of the forward. ``place``: buckets are summed from the greatest to the least.
    """

    size: int
    first: int
    last: int
    place: int


def whole_bytes(lowered: Lowered, schedule: SchedulePlan) -> list[int]:
    """Of each pp rank."""
    shards, decisions, found = lowered.shards, lowered.decisions, []
    if not any(buffer.scatters for buffer in shards.buffers):
        return [0] * len(schedule.actions)
    for rank, gathered in enumerate(gathered_weights(lowered, schedule)):
        buffers = [buffer for buffer in shards.buffers_of_rank(rank) if buffer.scatters]
        if schedule.has_weights:
            most = sum(b.layout.num_elements * b.gradient_dtype.itemsize for b in buffers)
        else:
            chunks = decisions.mesh.stages_of(rank)
            most = max(most_gradients(fillings_of(decisions, buffers, rank, stage)) for stage in chunks)
        found.append(gathered.most_bytes + most)
    return found


def most_gradients(buckets: Sequence[Filling]) -> int:
    """The most bytes at once in the backward of one stage."""
    order = sorted(buckets, key=lambda bucket: -bucket.place)
    opened = [(-bucket.last, 0, n) for n, bucket in enumerate(order)]
    filled = [(-bucket.first, 1, n) for n, bucket in enumerate(order)]
    held, full, begun, most = set[int](), set[int](), 0, 0
    for _, is_full, number in sorted(opened + filled):
        if not is_full:
            held.add(number)
            most = max(most, sum(order[n].size for n in held))
            continue
        full.add(number)
        while begun in full:  # sums begin in one order on all ranks, each when the one before has ended
            held.discard(begun - 1)
            begun += 1
    return most


def fillings_of(decisions: Decisions, buffers: Sequence[Buffer], pp_rank: int, stage: int) -> list[Filling]:
    """The buckets that the backward of ``stage`` fills."""
    program, stages = decisions.program, decisions.stages
    position = {node: number for number, node in enumerate(program.graph.graph.nodes)}
    readers: dict[str, list[int]] = {}
    for node in program.graph.graph.find_nodes(op="placeholder"):
        if node.name in program.parameters:
            here = [position[u] for u in node.users if u.op == "call_function" and stages.runs_on(u.name, stage)]
            readers.setdefault(program.parameters[node.name], []).extend(here)
    place = {p.fqn: number for number, p in enumerate(parameters_of_rank(decisions, pp_rank))}
    found = []
    for buffer in buffers:
        for bucket in buffer.layout.buckets:
            names = [slot.name for slot in bucket.slots]
            read = [at for name in names for at in readers.get(name, ())]
            if read:
                size = len(bucket.world) * buffer.gradient_dtype.itemsize
                found.append(Filling(size, min(read), max(read), min(place[name] for name in names)))
    return found
