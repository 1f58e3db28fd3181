"""The peak memory of a rank: one walk along its order adds and frees bytes.

          during the action                        after the action
    F     saved + peak of the forward              + saved tensors of the microbatch
    B     saved + backward beyond saved tensors    − saved tensors of the microbatch, + tensors that its W reads
    W     saved                                    − tensors that the W reads

Message buffers come on top: those received ahead for the next action, and those sent but not known to be consumed. A
send counts until a message arrives from its receiver that was sent at or after the action that consumed it, as with
gloo; NCCL may free the buffer sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat, zip_longest
from typing import NamedTuple

from planner.pipeline.actions import Action, Order
from planner.pipeline.links import Message, RankMessages, received_by, sent_by


class StageBytes(NamedTuple):
    """Bytes of one microbatch on a stage. ``kept``: saved between forward and backward; ``logits``: the part of them
    after the last block; ``forward``, ``backward``: peak of that action, kept bytes included; ``aside``: kept by B
    for W. ``received``: kept bytes that the previous stage sent; ``returned``: gradients from the next stage;
    ``sent``: values for the next stage that this stage does not save; ``passed_on``: those that it saves too.
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
        """Return a copy without ``given`` received bytes, which are counted elsewhere."""
        kept, forward, backward = (total - given for total in (self.kept, self.forward, self.backward))
        return self._replace(kept=kept, forward=forward, backward=backward, received=self.received - given)


class Peak(NamedTuple):
    """Bytes at the peak, which is at ``action``. ``kept``: saved by autograd or for W; ``logits``: the part of them
    after the last block; ``working``: other memory of the action; ``messages``: message buffers."""

    action: Action | None = None
    kept: float = 0
    logits: float = 0
    working: float = 0
    messages: float = 0

    @property
    def total(self) -> float:
        return self.kept + self.working + self.messages


def peak(order: Order, chunks: Sequence[StageBytes], messages: Iterable[float] = repeat(0)) -> Peak:
    """Return the peak of an order; the first one of equals. ``messages``: bytes of message buffers at each action."""
    highest, most, saved, logits = Peak(), 0.0, 0, 0
    for action, buffers in zip(order, messages, strict=False):
        of = chunks[action.chunk]
        before, kept, working, after = logits, saved, 0, saved - of.aside
        if action.kind == "F":  # its saved bytes count from its first call on
            kept = after = saved + of.kept
            before = logits = logits + of.logits
            working = of.forward - of.kept
        elif action.kind == "B":
            working, after = of.backward - of.kept, saved - of.kept + of.aside
            logits = logits - of.logits
        if kept + working + buffers > most:
            highest, most = Peak(action, kept, before, working, buffers), kept + working + buffers
        saved = after
    return highest


def under_way(
    own: RankMessages,
    ahead: Callable[[Message], int],
    sent: Callable[[Message], int],
    *,
    handed: Callable[[Message], int] = lambda message: 0,
    waits: bool = False,
) -> Iterator[int]:
    """Yield the bytes of a rank's message buffers at each of its actions.

    ``ahead``, ``sent``, ``handed``: bytes of a message that is received ahead, that is being sent, or that stays on
    this rank between two of its stages. ``waits``: a send ends before the next one begins.
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
