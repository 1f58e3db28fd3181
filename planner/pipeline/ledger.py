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
from itertools import repeat, zip_longest
from typing import NamedTuple

from planner.pipeline.actions import Action, Order
from planner.pipeline.links import Message, RankMessages, received_by, sent_by


class StageBytes(NamedTuple):
    """Of one microbatch on a stage: ``kept`` between forward and backward, ``logits`` its part after the last block;
    at the peak of a ``forward`` and of a ``backward``, kept bytes included; ``aside``: left by a B for its W.
    ``received``: kept bytes that came from the stage before; ``returned``: gradients that come back over its end;
    ``sent``: values for the next stage that are not saved here; ``passed_on``: those that are.
    """

    kept: float
    logits: float
    forward: float
    backward: float
    aside: float = 0
    received: float = 0
    returned: float = 0
    sent: float = 0
    passed_on: float = 0

    def without(self, given: float) -> StageBytes:
        """The same without bytes that it receives and that are counted elsewhere."""
        kept, forward, backward = (total - given for total in (self.kept, self.forward, self.backward))
        return self._replace(kept=kept, forward=forward, backward=backward, received=self.received - given)


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


def under_way(
    own: RankMessages,
    ahead: Callable[[Message], int],
    sent: Callable[[Message], int],
    *,
    handed: Callable[[Message], int] = lambda message: 0,
    waits: bool = False,
) -> Iterator[int]:
    """Bytes of messages at each action of a rank.

    ``ahead``, ``sent``: bytes of a message that is received ahead, and that is under way from here. ``handed``: of one
    between two stages of this rank. ``waits``: an earlier send has ended before the next one begins.
    """
    here = dict[Message | None, int]()
    for action, following in zip_longest(own.order, own.order[1:]):
        here.pop(own.message(action, received_by), None)
        own.taken_before(action)
        posted = own.crossing(following, received_by)
        yield sum(map(sent, own.sending)) + sum(here.values()) + (0 if posted is None else ahead(posted))
        if waits and action.kind != "W":
            own.sending.clear()
        message = own.message(action, sent_by)
        if own.send(action) is None and message is not None:
            here[message] = handed(message)
