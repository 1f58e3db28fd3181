"""The peak memory of a pipeline rank along its list of actions, by category.

    F   held + what the forward takes at its peak           afterwards: + what is kept of that microbatch
    B   held + what the backward takes beyond what is kept  afterwards: − what was kept of that microbatch
                                                                        + what it puts aside, where a W follows
    W   held                                                afterwards: − what was put aside

and beside it the messages under way: received ahead for the next action, and sent but not known to be taken over. A
send counts until a message comes from the rank that took it, sent by an action at or after the one that used it, as
gloo frees it; NCCL may do so sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.cost.liveness import StageMemory
from planner.fold import LOOP, Fold, stage_of
from planner.pipeline.links import Message, Progress, received_by, sent_by
from planner.pipeline.schedule import Action, Order
from planner.sharding.shards import Shards


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes at ``action``: ``kept`` by autograd, and aside for W; ``logits``: its part after the last block;
    ``working`` beside it; ``messages`` under way."""

    action: str = ""
    kept: int = 0
    logits: int = 0
    working: int = 0
    messages: int = 0

    @property
    def total(self) -> int:
        return self.kept + self.working + self.messages


def peak_of(
    orders: Sequence[Order],
    pp_rank: int,
    stages: Sequence[StageMemory],
    shards: Shards,
    fold: Fold = LOOP,
    stands_still: bool = False,
) -> Peak:
    """The first of equal peaks. ``stages``: of every stage of the pipeline; ``orders``: the actions of every rank.

    ``stands_still``: messages lie in buffers that are counted elsewhere, received values too.
    """
    return _Rank(orders, pp_rank, stages, shards, fold, stands_still).run()


class _Rank:
    """Owns the bytes held at a moment: of microbatches in flight, and in messages."""

    def __init__(
        self,
        orders: Sequence[Order],
        rank: int,
        stages: Sequence[StageMemory],
        shards: Shards,
        fold: Fold,
        stands_still: bool,
    ) -> None:
        self.order, self.rank, self.pp, self.stages, self.shards = orders[rank], rank, len(orders), stages, shards
        self.fold: Fold = fold
        self.stands_still = stands_still
        self.sending: dict[Message, int] = {}
        self.progress = Progress(orders, fold)

    def run(self) -> Peak:
        peak, held = Peak(), Peak()
        for at, action in enumerate(self.order):
            memory = self._memory(action)
            self._receive(action)
            messages = sum(self.sending.values()) + sum(map(self._posted, self.order[at + 1 : at + 2]))
            messages = 0 if self.stands_still else messages
            during = self._during(action, memory, held)
            during = replace(during, messages=messages)
            if during.total > peak.total:
                peak = during
            held = self._after(action, memory, held)
            self._send(action, memory)
        return peak

    def _after(self, action: Action, memory: StageMemory, held: Peak) -> Peak:
        if action.kind == "W":
            return replace(held, kept=held.kept - memory.aside)
        sign = 1 if action.kind == "F" else -1
        aside = memory.aside if action.kind == "B" else 0
        return replace(held, kept=held.kept + sign * memory.kept + aside, logits=held.logits + sign * memory.logits)

    def _during(self, action: Action, memory: StageMemory, held: Peak) -> Peak:
        """The saved bytes of a forward count from its first call on; the rest of its peak is working memory."""
        if action.kind == "B":
            return replace(held, action=str(action), working=memory.backward - memory.kept)
        if action.kind == "W":
            return replace(held, action=str(action))
        kept, logits = held.kept + memory.kept, held.logits + memory.logits
        return Peak(str(action), kept, logits, memory.forward - memory.kept)

    def _stage(self, action: Action) -> int:
        return stage_of(self.rank, action.chunk, self.pp, self.fold)

    def _memory(self, action: Action) -> StageMemory:
        """The memory of the action's stage, without received values that static buffers hold."""
        stage = self._stage(action)
        memory = self.stages[stage]
        if not self.stands_still or not self._crosses(received_by("F", stage, action.microbatch)):
            return memory
        return memory.without(memory.received)

    def _crosses(self, message: Message) -> bool:
        return message.crosses(len(self.stages), self.pp, self.fold)

    def _posted(self, action: Action) -> int:
        """Bytes of the receive buffers that are posted for ``action``."""
        if action.kind == "W":
            return 0
        message = received_by(action.kind, self._stage(action), action.microbatch)
        return self._message_bytes(message) if self._crosses(message) else 0

    def _message_bytes(self, message: Message) -> int:
        return sum(b.bytes for b in self.shards.sent(message.boundary) if message.kind == "F" or b.requires_grad)

    def _receive(self, action: Action) -> None:
        """A message frees the sends that its sender had used by then."""
        if action.kind == "W":
            return
        received = received_by(action.kind, self._stage(action), action.microbatch)
        for sent in self.progress.taken_over(self.sending, received) if self._crosses(received) else ():
            del self.sending[sent]

    def _send(self, action: Action, memory: StageMemory) -> None:
        if action.kind == "W":
            return
        message = sent_by(action.kind, self._stage(action), action.microbatch)
        if self._crosses(message):
            self.sending[message] = memory.sent if message.kind == "F" else self._message_bytes(message)
