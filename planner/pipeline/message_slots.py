"""The static buffer of each message of a rank, if a full iteration is one graph.

A graph keeps all memory that another stream touches in its capture, so every NCCL buffer allocated there. Buffers
allocated earlier serve many messages in turn, each for the messages of one boundary in one direction:

    received    from the action before the one that needs it, which posts it, to the last action of its microbatch on
                the stages that may hold it: the receiver, and those of this rank that it hands values on to
    sent        from its action until a message comes from the rank that took it, sent by an action at or after the
                one that used it: then its end can be awaited without delay; no message follows values without gradients
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from planner.fold import LOOP, Fold, rank_of, stage_of
from planner.pipeline.actions import Action, Order
from planner.pipeline.links import Message, Progress, received_by, sent_by


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
    return _Rank(orders, pp_rank, num_stages, fold, one_way).run()


def ring_sizes(slots: Slots) -> dict[Ring, int]:
    """How many buffers each ring has."""
    sizes: dict[Ring, int] = {}
    for (is_received, message), slot in slots.items():
        ring = ring_of(is_received, message)
        sizes[ring] = max(sizes.get(ring, 0), slot + 1)
    return sizes


class _Rank:
    """Owns: the slots that are assigned so far, those that are free, and those that are still held."""

    def __init__(
        self, orders: Sequence[Order], rank: int, num_stages: int, fold: Fold, one_way: Collection[int]
    ) -> None:
        self.one_way = one_way
        self.order, self.rank, self.pp, self.num_stages = orders[rank], rank, len(orders), num_stages
        self.fold: Fold = fold
        self.progress = Progress(orders, fold)
        self.slots: Slots = {}
        self.free: defaultdict[Ring, list[int]] = defaultdict(list)
        self.used: defaultdict[Ring, int] = defaultdict(int)
        self.sending: list[Message] = []
        self.ends: defaultdict[int, list[Message]] = defaultdict(list)

    def run(self) -> Slots:
        for at, action in enumerate(self.order):
            for posted in self.order[at : at + 2]:
                self._post(posted)
            self._let_go_of_sent(action)
            self._send(action)
            for message in self.ends[at]:
                self._give_back(True, message)
        return self.slots

    def _post(self, action: Action) -> None:
        message = self._crossing(action, received_by)
        if message is not None and (True, message) not in self.slots:
            self._take(True, message)
            self.ends[self._last_reader(message)].append(message)

    def _send(self, action: Action) -> None:
        message = self._crossing(action, sent_by)
        if message is not None:
            self._take(False, message)
            self.sending.append(message)

    def _let_go_of_sent(self, action: Action) -> None:
        """Free the sends that the sender of ``action``'s message had used by then."""
        received = self._crossing(action, received_by)
        for sent in self.progress.taken_over(self.sending, received) if received else ():
            self.sending.remove(sent)
            self._give_back(False, sent)

    def _last_reader(self, message: Message) -> int:
        stages = {*self._handed_on(message.receiver, 1), *self._handed_on(message.receiver, -1)}
        known = ((kind, message.microbatch, stage) for kind in "FBW" for stage in stages)
        return max(self.progress.positions[key] for key in known if key in self.progress.positions)

    def _handed_on(self, stage: int, step: int) -> Iterator[int]:
        """``stage`` and those behind it that this rank runs too, without a message between."""
        while 0 <= stage < self.num_stages and rank_of(stage, self.pp, self.fold) == self.rank:
            yield stage
            stage += step

    def _crossing(self, action: Action, found_by: Callable[[str, int, int], Message]) -> Message | None:
        """The message that the action sends or receives, by ``found_by``; None if it stays on this rank."""
        if action.kind == "W":
            return None
        message = found_by(action.kind, stage_of(self.rank, action.chunk, self.pp, self.fold), action.microbatch)
        if message.kind == "B" and message.boundary in self.one_way:
            return None
        return message if message.crosses(self.num_stages, self.pp, self.fold) else None

    def _take(self, is_received: bool, message: Message) -> None:
        ring = ring_of(is_received, message)
        if not self.free[ring]:
            heappush(self.free[ring], self.used[ring])
            self.used[ring] += 1
        self.slots[is_received, message] = heappop(self.free[ring])

    def _give_back(self, is_received: bool, message: Message) -> None:
        heappush(self.free[ring_of(is_received, message)], self.slots[is_received, message])
