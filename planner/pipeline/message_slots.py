"""The static buffer of each message of a rank, if a full iteration is one graph; buffers and graphs of its forwards.

A graph keeps all memory that another stream touches in its capture, so every NCCL buffer allocated there. Buffers
allocated earlier serve many messages in turn, each for the messages of one boundary in one direction:

    received    from the action before the one that needs it, which posts it, to the last action of its microbatch on
                the stages that may hold it: the receiver, and those of this rank that it hands values on to
    sent        from its action until a message comes from the rank that took it, sent by an action at or after the
                one that used it: then its end can be awaited without delay; no message follows values without gradients

A forward of layer i takes the buffer of i's kind that has been free longest, or a new one; its backward frees it. A
region makes the gradients of its weights there too, so its memory waits for no W.

    static inputs     kind = signature (shape, dtype, stride)       layers · (warm-up + 1), if signatures are equal
    graphs by slot    kind = the layer, as a graph has the layer's weights, and reads and writes the addresses of its
                      capture: 2 · Σ over chunks of  layers of the chunk · most microbatches in flight on it
    graphs by microbatch, as elsewhere:  2 · layers · microbatches, and 2 · layers if none overlap
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
    """The buffers that messages of one boundary in one direction take in turn on one end."""

    is_received: bool
    kind: str
    boundary: int


Slots = dict[tuple[bool, Message], int]


def ring_of(is_received: bool, message: Message) -> Ring:
    return Ring(is_received, message.kind, message.boundary)


def message_slots(
    orders: Sequence[Order], pp_rank: int, num_stages: int, fold: Fold = LOOP, one_way: Collection[int] = ()
) -> Slots:
    """(whether it is received, message) → its place in its ring, of all messages of ``pp_rank`` in a step.

    ``one_way``: boundaries that no gradient crosses.
    """
    own, slots = RankMessages(orders, pp_rank, num_stages, fold, one_way), _MessageSlots()
    ends: defaultdict[int, list[Message]] = defaultdict(list)  # where a received message is read for the last time
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
    """Owns: the slots that are ``taken`` so far, and of each ring those that are free."""

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
    """``stage`` and those behind it that the rank runs too, without a message between."""
    while stage in own.stages:
        yield stage
        stage += step


SlotKey = tuple[int, int, int]  # microbatch, chunk, layer of the chunk


def slots_by_kind(
    order: Order, kinds: Sequence[Sequence[Hashable]] | Mapping[int, Sequence[Hashable]]
) -> dict[SlotKey, int]:
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
