"""The static memory of a rank's regions: every slot of a chunk has inputs, outputs and gradients of its own.

bytes = Σ over regions   (bytes of one slot) · (most microbatches that its chunk has in flight)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from planner.pipeline.schedule import Order
from planner.pipeline.slots import graph_slots
from planner.regions.regions import Region


def slots_of(order: Order) -> dict[tuple[int, int], int]:
    """(chunk, microbatch) → the slot in which all regions of the chunk run it; slots of chunks are distinct."""
    num_chunks = 1 + max(action.chunk for action in order)
    return {(chunk, m): slot for (m, chunk, _), slot in graph_slots(order, [1] * num_chunks).items()}


def num_slots(slots: dict[tuple[int, int], int]) -> dict[int, int]:
    """Chunk → how many slots it has."""
    return dict(Counter(chunk for chunk, _ in {(chunk, slot) for (chunk, _), slot in slots.items()}))


def static_bytes(regions: Iterable[Region], orders: Sequence[Order]) -> tuple[int, ...]:
    """Bytes of all slots of all captured regions, for each pp rank."""
    pp, total = len(orders), [0] * len(orders)
    counts = [num_slots(slots_of(order)) for order in orders]
    for region in regions:
        if not region.refused:
            total[region.stage % pp] += region.static_bytes * counts[region.stage % pp][region.stage // pp]
    return tuple(total)
