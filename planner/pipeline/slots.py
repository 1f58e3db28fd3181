"""Which static buffers each forward of a rank uses, so that few of them serve many microbatches.

    take(F of microbatch m, layer i)   the buffer of i's kind that has been free longest, or a new one
    free(B of microbatch m, layer i)   that buffer, for the next forward of the kind; a region makes the gradients of
                                       its weights there too, so its memory waits for no W

Two questions are answered by the same queue, with another kind:

    static inputs     kind = signature (shape, dtype, stride): layers of one signature share buffers
                      equal signatures:  layers · (warm-up + 1)
    graphs by slot    kind = the layer itself, since a graph has the layer's weights inside:
                      2 · Σ over chunks of  layers of the chunk · most microbatches in flight on it
                      one chunk:         2 · layers · (warm-up + 1)
    graphs by microbatch, as elsewhere:  2 · layers · microbatches, and 2 · layers if none overlap

The first two count layers in flight at once, so they do not grow with the number of microbatches. With several chunks
Σ of their peaks is a little more than warm-up + 1, as chunks do not peak at one time (pp 4, vpp 2: 8 + 4 on rank 0,
with 11 in flight at once). A graph reads and writes the addresses of its capture: were the 11 buffers for both
chunks, each chunk would be given all of them in turn and need as many graphs, 11 + 11 pairs, to save one slot.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from itertools import count

from planner.pipeline.actions import Order, without_weights

SlotKey = tuple[int, int, int]  # microbatch, chunk, layer of the chunk


def slots_by_kind(order: Order, kinds: Sequence[Sequence[Hashable]]) -> dict[SlotKey, int]:
    """The slot of each (microbatch, chunk, layer), numbered from 0; layer i of chunk c is of ``kinds[c][i]``.

    Layers take their slots in order, and all of a chunk give theirs back when its backward is done.
    """
    free: defaultdict[Hashable, deque[int]] = defaultdict(deque)
    new = count()
    slots: dict[SlotKey, int] = {}
    for action in without_weights(order):
        for layer, kind in enumerate(kinds[action.chunk]):
            key = action.microbatch, action.chunk, layer
            if action.kind == "F":
                slots[key] = free[kind].popleft() if free[kind] else next(new)
            else:
                free[kind].append(slots[key])
    return slots


def static_input_slots(order: Order, num_layers: Sequence[int] = ()) -> dict[SlotKey, int]:
    """The static input buffer of each (microbatch, chunk, layer) when all layers have inputs of one signature.

    ``num_layers[chunk]`` layers a chunk; without it, one.
    """
    return slots_by_kind(order, [[None] * n for n in num_layers or _one_layer(order)])


def num_static_input_slots(order: Order, num_layers: Sequence[int] = ()) -> int:
    """How many static input buffers ``order`` needs."""
    return len(set(static_input_slots(order, num_layers).values()))


def graph_slots(order: Order, num_layers: Sequence[int]) -> dict[SlotKey, int]:
    """Which pair of graphs, forward and backward, runs each (microbatch, chunk, layer): a pair has one layer."""
    return slots_by_kind(order, [[(chunk, i) for i in range(n)] for chunk, n in enumerate(num_layers)])


def num_graph_slots(order: Order) -> int:
    """How many slots a layer has on all chunks together if each slot of a chunk is a pair of graphs of its own."""
    return len(set(graph_slots(order, _one_layer(order)).values()))


def num_graphs_by_microbatch(order: Order, num_layers: Sequence[int]) -> int:
    """Graphs of a rank when each microbatch has its own, as one captures that knows the order but no slots."""
    return 2 * sum(num_layers[action.chunk] for action in order_by_microbatch(order) if action.kind == "F")


def order_by_microbatch(order: Order) -> Order:
    """The actions of the microbatches that need graphs of their own if graphs do not share slots.

    That is the full order; but if each backward directly follows its forward, one microbatch's graphs serve all.
    """
    order = without_weights(order)
    pairs = list(zip(order[::2], order[1::2], strict=False))
    alone = all(f.kind == "F" and b == f._replace(kind="B") for f, b in pairs) and 2 * len(pairs) == len(order)
    first: dict[int, int] = {}
    for action in order:
        first.setdefault(action.chunk, action.microbatch)
    return tuple(action for action in order if not alone or action.microbatch == first[action.chunk])


def _one_layer(order: Order) -> list[int]:
    return [1] * (1 + max((action.chunk for action in order), default=0))
