"""Static memory for CUDA graphs: message buffers when a whole step is one graph, and slots of captured layers.

A CUDA graph keeps all memory that another stream touches during its capture, so every NCCL buffer allocated there.
Buffers allocated before the capture are reused instead, in a ring for each stage boundary and direction. In use:

    received    from the action before the one that needs it, which posts the receive, to the last action of its
                microbatch on the stages that may hold it: the receiver, and later ones of this rank that read it
    sent        from its action until a message arrives that its receiver sent at or after the action that consumed it:
                then the send has ended. No such message arrives where no gradient returns

A forward of layer i takes the buffer of i's kind that has been free longest, or a new one; its backward frees it. A
captured backward computes weight gradients too, so its memory is not kept for a W.

    static inputs     kind = signature (shape, dtype, stride)       layers · (warm-up + 1), if signatures are equal
    graphs by slot    kind = the layer, as a graph has the layer's weights, and reads and writes the addresses of its
                      capture: 2 · Σ over chunks of  layers of the chunk · most microbatches in flight on it
    graphs by microbatch, for comparison:  2 · layers · microbatches, and 2 · layers if none overlap
"""

from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from planner.fold import LOOP, Fold
from planner.pipeline.actions import Order, without_weights
from planner.pipeline.links import Message, RankMessages, received_by


class Ring(NamedTuple):
    """The buffers that the messages of one stage boundary and direction reuse on one rank."""

    is_received: bool
    kind: str
    boundary: int


Slots = dict[tuple[bool, Message], int]


def ring_of(is_received: bool, message: Message) -> Ring:
    return Ring(is_received, message.kind, message.boundary)


def message_slots(
    orders: Sequence[Order], pp_rank: int, num_stages: int, fold: Fold = LOOP, one_way: Collection[int] = ()
) -> Slots:
    """Return (whether it is received, message) → its slot in its ring, for all messages of ``pp_rank`` in a step.

    ``one_way``: stage boundaries that no gradient crosses.
    """
    own, slots = RankMessages(orders, pp_rank, num_stages, fold, one_way), _MessageSlots()
    ends: defaultdict[int, list[Message]] = defaultdict(list)  # position of its last reader → received messages
    for at, action in enumerate(own.order):
        for posted in own.order[at : at + 2]:
            message = own.crossing(posted, received_by)
            if message is not None and (True, message) not in slots.taken:
                slots.take(True, message)
                ends[_last_reader(own, message)].append(message)
        for message in own.taken_before(action):
            slots.give_back(False, message)
        if (message := own.send(action)) is not None:
            slots.take(False, message)
        for message in ends[at]:
            slots.give_back(True, message)
    return slots.taken


def ring_sizes(slots: Slots) -> dict[Ring, int]:
    sizes: dict[Ring, int] = {}
    for (is_received, message), slot in slots.items():
        ring = ring_of(is_received, message)
        sizes[ring] = max(sizes.get(ring, 0), slot + 1)
    return sizes


class _MessageSlots:
    """The slots that were ``taken`` so far, and the free slots of each ring."""

    def __init__(self) -> None:
        self.taken: Slots = {}
        self.free: defaultdict[Ring, list[int]] = defaultdict(list)
        self.new: defaultdict[Ring, Iterator[int]] = defaultdict(count)

    def take(self, is_received: bool, message: Message) -> None:
        ring = ring_of(is_received, message)
        self.taken[is_received, message] = heappop(self.free[ring]) if self.free[ring] else next(self.new[ring])

    def give_back(self, is_received: bool, message: Message) -> None:
        heappush(self.free[ring_of(is_received, message)], self.taken[is_received, message])


def _last_reader(own: RankMessages, message: Message) -> int:
    stages = {*_handed_on(own, message.receiver, 1), *_handed_on(own, message.receiver, -1)}
    known = ((kind, message.microbatch, stage) for kind in "FBW" for stage in stages)
    return max(own.progress.positions[key] for key in known if key in own.progress.positions)


def _handed_on(own: RankMessages, stage: int, step: int) -> Iterator[int]:
    """Yield ``stage`` and its neighbours in one direction, as long as this rank runs them too."""
    while stage in own.stages:
        yield stage
        stage += step


SlotKey = tuple[int, int, int]  # microbatch, chunk, layer of the chunk


def slots_by_kind(
    order: Order, kinds: Sequence[Sequence[Hashable]] | Mapping[int, Sequence[Hashable]]
) -> dict[SlotKey, int]:
    """Return the slot, from 0, of each (microbatch, chunk, layer); layer i of chunk c has the kind ``kinds[c][i]``.

    The layers of a chunk take slots in order, and free them all after the chunk's backward.
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


def order_by_microbatch(order: Order) -> Order:
    """Return the actions that need separate graphs if each microbatch has its own graphs.

    These are all actions, unless each backward directly follows its forward: then one microbatch's graphs serve all.
    """
    order = without_weights(order)
    pairs = list(zip(order[::2], order[1::2], strict=False))
    alone = all(f.kind == "F" and b == f._replace(kind="B") for f, b in pairs) and 2 * len(pairs) == len(order)
    first: dict[int, int] = {}
    for action in order:
        first.setdefault(action.chunk, action.microbatch)
    return tuple(action for action in order if not alone or action.microbatch == first[action.chunk])
