"""Bytes of full weights and gradients on one rank while it needs them, if ranks keep shards of them (zero 2 and 3).

weights     the most that its moves make whole at once (planner.exchanges.weights)
gradients   those of the unit that a backward fills, and of one bucket of the unit before, with sums under way; of
            units with several readers, which fill from the last to the first; all of a rank if they wait for a W of
            the schedule
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from planner.exchanges.weights import gathered_weights
from planner.pipeline.schedule import SchedulePlan
from planner.saved.lowered import Lowered
from planner.sharding.buffers import Buffer
from planner.sharding.visits import units_of


def whole_bytes(lowered: Lowered, schedule: SchedulePlan) -> list[int]:
    """Of each pp rank."""
    shards, found = lowered.shards, []
    if not any(buffer.scatters for buffer in shards.buffers):
        return [0] * len(schedule.actions)
    units = units_of(lowered.decisions)
    for rank, gathered in enumerate(gathered_weights(lowered, schedule)):
        alone, several = _gradients(shards.buffers_of_rank(rank), units)
        gradients = most_gradients(alone, waits=schedule.has_weights) + several
        found.append(gathered.most_bytes + gradients)
    return found


def most_gradients(units: Sequence[Sequence[int]], *, waits: bool) -> int:
    """``units``: bytes of the buckets of each, in the order of the forward."""
    if waits:
        return sum(map(sum, units))
    alone = max((sum(unit) for unit in units), default=0)
    return max((sum(before) + max(after) for before, after in pairwise(units)), default=alone)


def _gradients(
    buffers: Sequence[Buffer], units: Mapping[str, tuple[tuple[int, bool], ...]]
) -> tuple[list[list[int]], int]:
    """Bytes of the buckets of each unit with one place, in the order of the forward, and of all other units."""
    alone, several = dict[tuple[tuple[int, bool], ...], list[int]](), 0
    for buffer in buffers:
        for bucket in buffer.layout.buckets if buffer.scatters else ():
            places = units[bucket.slots[0].name]
            size = len(bucket.world) * buffer.gradient_dtype.itemsize
            if len(places) == 1:
                alone.setdefault(places, []).append(size)
            else:
                several += size
    return [alone[places] for places in sorted(alone)], several
