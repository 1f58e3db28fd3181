"""The one walk in bytes: what a rank holds along its order, at its peak.

    F   held + what the forward takes         afterwards: + what is kept of its microbatch
    B   held + what the backward takes beyond what is kept        afterwards: − what was kept of that microbatch
                                                                              + what it puts aside, where a W follows
    W   held                                  afterwards: − what was put aside

and beside it the messages under way: received ahead for the next action, and sent but not known to be taken over. A
send counts until a message comes from the rank that took it, sent by an action at or after the one that used it, as
gloo frees it; NCCL may do so sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

from planner.fold import Fold, stages_of
from planner.pipeline.actions import Action, Order
from planner.pipeline.links import Message, Progress, received_by, sent_by


class StageBytes(NamedTuple):
    """Of one microbatch on a chunk: ``kept`` between forward and backward, ``logits`` its part after the last block;
    at the peak of a ``forward`` and of a ``backward``, kept bytes included; ``aside``: left by a B for its W."""

    kept: float
    logits: float
    forward: float
    backward: float
    aside: float = 0.0


class Peak(NamedTuple):
    """Bytes at ``action``: ``kept`` by autograd, and aside for W; ``logits``: its part after the last block;
    ``working`` beside it; ``messages`` under way."""

    action: Action | None = None
    kept: float = 0
    logits: float = 0
    working: float = 0
    messages: float = 0

    @property
    def total(self) -> float:
        return self.kept + self.working + self.messages


def peak(order: Order, chunks: Sequence[StageBytes], messages: Iterable[float] = repeat(0)) -> Peak:
    """The first of equal peaks. ``messages``: bytes under way at each action."""
    found, most, held, logits = Peak(), 0.0, 0, 0
    for action, under_way in zip(order, messages, strict=False):
        of = chunks[action.chunk]
        before, kept, working, after = logits, held, 0, held - of.aside
        if action.kind == "F":  # its saved bytes count from its first call on
            kept = after = held + of.kept
            before = logits = logits + of.logits
            working = of.forward - of.kept
        elif action.kind == "B":
            working, after = of.backward - of.kept, held - of.kept + of.aside
            logits = logits - of.logits
        if kept + working + under_way > most:
            found, most = Peak(action, kept, before, working, under_way), kept + working + under_way
        held = after
    return found


class UnderWay:
    """Owns the messages that a rank has sent and that are not known to be taken over.

    ``ahead``, ``sent``: bytes of a message that is received ahead, and that is under way from here. ``handed``: of one
    between two stages of this rank. ``waits``: an earlier send has ended before the next one begins.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        rank: int,
        num_stages: int,
        fold: Fold,
        ahead: Callable[[Message], int],
        sent: Callable[[Message], int],
        *,
        handed: Callable[[Message], int] = lambda message: 0,
        waits: bool = False,
    ) -> None:
        self.order, self.pp, self.num_stages = orders[rank], len(orders), num_stages
        self.fold: Fold = fold
        self.stages = stages_of(rank, self.pp, num_stages, fold)
        self.progress = Progress(orders, fold)
        self.ahead, self.sent, self.handed, self.waits = ahead, sent, handed, waits
        self.sending: dict[Message, int] = {}
        self.here: dict[Message, int] = {}

    def __iter__(self) -> Iterator[int]:
        for at, action in enumerate(self.order):
            self._receive(action)
            under_way = sum(self.sending.values()) + sum(self.here.values())
            yield under_way + sum(map(self._posted, self.order[at + 1 : at + 2]))
            self._send(action)

    def _crosses(self, message: Message) -> bool:
        return message.crosses(self.num_stages, self.pp, self.fold)

    def _posted(self, action: Action) -> int:
        """Bytes of the receive buffers that are posted for ``action``."""
        message = received_by(action.kind, self.stages[action.chunk], action.microbatch)
        return self.ahead(message) if action.kind != "W" and self._crosses(message) else 0

    def _receive(self, action: Action) -> None:
        """A message frees the sends that its sender had used by then."""
        if action.kind == "W":
            return
        received = received_by(action.kind, self.stages[action.chunk], action.microbatch)
        self.here.pop(received, None)
        for taken in self.progress.taken_over(self.sending, received) if self._crosses(received) else ():
            del self.sending[taken]

    def _send(self, action: Action) -> None:
        if action.kind == "W":
            return
        if self.waits:
            self.sending.clear()
        message = sent_by(action.kind, self.stages[action.chunk], action.microbatch)
        if self._crosses(message):
            self.sending[message] = self.sent(message)
        elif 0 <= message.boundary < self.num_stages - 1:
            self.here[message] = self.handed(message)
