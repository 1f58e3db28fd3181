"""Which static input buffer each forward of a rank uses, so that few buffers serve many microbatches.

A forward takes the buffer that has been free longest, or a new one; its backward gives it back. So the number of
buffers is that of the activations in flight, and does not grow with the microbatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count

from planner.pipeline.schedule import Order

SlotKey = tuple[int, int, int]  # microbatch, chunk, layer of the chunk


def static_input_slots(order: Order, num_layers: Sequence[int] = ()) -> dict[SlotKey, int]:
    """The buffer of each (microbatch, chunk, layer), numbered from 0, when all layers have inputs of one signature.

    ``num_layers[chunk]`` layers a chunk; without it, one.
    """
    free: deque[int] = deque()
    new = count()
    slots: dict[SlotKey, int] = {}
    for action in order:
        layers = range(num_layers[action.chunk] if num_layers else 1)
        keys = [(action.microbatch, action.chunk, layer) for layer in layers]
        if action.kind == "F":
            slots.update({key: free.popleft() if free else next(new) for key in keys})
        else:
            free.extend(slots[key] for key in keys)
    return slots


def num_static_input_slots(order: Order, num_layers: Sequence[int] = ()) -> int:
    """How many static input buffers ``order`` needs."""
    return len(set(static_input_slots(order, num_layers).values()))
