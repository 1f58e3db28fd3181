"""The gathers of weights that ranks hold in shards (zero 3): the moves of each pp rank in a step, counted.

    for action of the rank's order:  for visit of its stage:  residency.need(units, units of the next visit)

The runtime makes the same moves (planner.sharding.residency), so each row is what a step runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from passes.gather_weights import Visit, moves_of
from passes.ops.parameter_gate import Units
from passes.types.collectives import CollectivePlan
from planner.pipeline.actions import Order
from planner.pipeline.schedule import SchedulePlan
from planner.saved.lowered import Lowered
from planner.sharding.residency import Residency, Unit
from planner.sharding.shards import Shards


@dataclass(frozen=True)
class Gathered:
    """Of one pp rank: how often a step gathers each unit, by phase, and the most bytes of whole weights at once."""

    times: Counter[tuple[Unit, str]]
    most_bytes: int


def weight_rows(lowered: Lowered, schedule: SchedulePlan) -> tuple[CollectivePlan, ...]:
    """One row for each unit and phase."""
    rows = []
    for pp_rank, found in enumerate(gathered_weights(lowered, schedule)):
        buffers, shards = lowered.shards.buffers_of_rank(pp_rank), lowered.shards
        for ((number, index), phase), times in found.times.items():
            buffer = buffers[number]
            bucket = buffer.layout.buckets[index]
            count = len(bucket.slots)
            held = f"{count} parameters" if count > 1 else bucket.slots[0].name
            what = f"optimizer.buffers.{shards.buffers.index(buffer)}.buckets.{index}   (weights of {held})"
            size = len(bucket.world) * buffer.gather_dtype.itemsize
            over = buffer.reduced_over
            rows.append(CollectivePlan("all_gather", over, phase, what, size, times, "step", pp_rank))
    return tuple(rows)


def gathered_weights(lowered: Lowered, schedule: SchedulePlan) -> list[Gathered]:
    """Of each pp rank; nothing if no weight is sharded between its uses."""
    if not any(buffer.gathers for buffer in lowered.shards.buffers):
        return [Gathered(Counter(), 0) for _ in schedule.actions]
    visits = [lowered.visits(stage) for stage in range(lowered.num_stages)]
    mesh = lowered.decisions.mesh
    twice = lowered.decisions.terms.in_turn > 1
    return [
        _of_rank(order, [visits[stage] for stage in mesh.stages_of(rank)], lowered.shards, rank, twice)
        for rank, order in enumerate(schedule.actions)
    ]


def gathered_to_evaluate(lowered: Lowered, orders: Sequence[Order]) -> list[Gathered]:
    """Of each pp rank that runs the forwards ``orders`` alone, and frees weights after each use."""
    if not any(buffer.gathers for buffer in lowered.shards.buffers):
        return [Gathered(Counter(), 0) for _ in orders]
    shards, mesh = replace(lowered.shards, reshards=True, kept=()), lowered.decisions.mesh
    visits = [lowered.visits(stage) for stage in range(lowered.num_stages)]
    return [
        _of_rank(order, [visits[stage] for stage in mesh.stages_of(rank)], shards, rank, False)
        for rank, order in enumerate(orders)
    ]


def _of_rank(order: Order, stages: Sequence[list[Visit]], shards: Shards, pp_rank: int, twice: bool) -> Gathered:
    sizes, sent = dict[Unit, int](), dict[Unit, int]()
    for number, buffer in enumerate(shards.buffers_of_rank(pp_rank)):
        for bucket in buffer.layout.buckets if buffer.gathers else ():
            sizes[number, bucket.index] = len(bucket.world) * buffer.dtype.itemsize
            sent[number, bucket.index] = len(bucket.world) * buffer.gather.itemsize if buffer.gather else 0
    residency = Residency(reshards=shards.reshards, kept=shards.kept_by(pp_rank))
    times, most = Counter[tuple[Unit, str]](), 0
    for phase, units, ahead in _needs(order, stages, twice):
        moves = residency.need(units, ahead)
        times.update((unit, phase) for unit in moves.gathered)
        held = sum(sizes[unit] for unit in residency.whole) + sum(sent[unit] for unit in residency.coming)
        residency.came(units)
        most = max(most, held)
    return Gathered(times, most)


def _needs(order: Order, stages: Sequence[list[Visit]], twice: bool) -> Iterator[tuple[str, Units, Units]]:
    """(phase, units, units ahead), one after the other, of a step of a rank."""
    forwards = [action for action in order if action.kind == "F"] if twice else []
    for action in (*forwards, *order):
        if action.kind != "W":
            forward = action.kind == "F"
            for units, ahead in moves_of(stages[action.chunk], forward=forward):
                yield "forward" if forward else "backward", units, ahead
