"""Boundary tensors: activations sent from one stage to the next, and their gradients sent back.

Boundary i lies between stage i and stage i + 1. A message is all tensors of one boundary for one microbatch in one
direction: "F" carries values down, "B" gradients up (``planner.pipeline.links``). Receives are posted ahead of their
use, so that gloo and NCCL fill the buffer while the rank computes. Stages on the same rank hand their tensors over
directly.

No send is waited for inside a step: with a large interleaved group both neighbours send many messages before either
receives the first of them, and would wait for each other. A sent buffer is freed when it is known to be taken over:

    the backend says so (NCCL), or
    a message comes from the rank that took it, sent by an action at or after the one that used it     (gloo never says)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from passes.program.stages import BoundaryPlan
from planner.pipeline.links import Message, Progress
from planner.pipeline.schedule import Order
from runtime.distributed.groups import Groups
from runtime.distributed.marks import Marks
from runtime.pipeline.message_buffers import FreshBuffers, MessageBuffers
from runtime.pipeline.waits import Waits


class _Transfer(NamedTuple):
    """Buffers in flight, and the works that complete them."""

    buffers: list[Tensor]
    works: list[Any]

    def is_done(self) -> bool:
        """Not during the capture of a graph, because its work has not started."""
        if self.buffers and self.buffers[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Transport:
    """Exchanges messages with the neighbouring stages.

    Owns: the receive buffers posted ahead, the send buffers still in use, messages between stages of this rank, and
    how long it has waited for others (``waits``). ``memory``: the buffers of messages.
    """

    def __init__(self, groups: Groups, num_stages: int, orders: Sequence[Order] = ()) -> None:
        """``orders``: the actions of every pp rank; without them, messages carry no progress of their sender."""
        self.groups = groups
        self.num_stages = num_stages
        self.orders = tuple(orders)
        self.memory: MessageBuffers = FreshBuffers(groups.device)
        self.waits = Waits(Marks(groups.device), num_ranks=groups.mesh.pp, is_alone=groups.mesh.world_size == 1)
        self._progress = Progress(orders, groups.mesh.fold)
        self._posted: dict[Message, _Transfer] = {}
        self._handed: dict[Message, list[Tensor]] = {}
        self._sending: dict[Message, _Transfer] = {}

    @property
    def num_sending(self) -> int:
        """Messages with buffers in use."""
        return len(self._sending)

    @contextmanager
    def lying_in(self, memory: MessageBuffers) -> Iterator[None]:
        """Messages of the steps inside lie there."""
        before, self.memory = self.memory, memory
        try:
            yield
        finally:
            self.memory = before

    @property
    def buffers(self) -> Iterator[Tensor]:
        """Of all messages under way, in either direction, and of those that wait on this rank."""
        for handed in self._handed.values():
            yield from handed
        for transfer in (*self._posted.values(), *self._sending.values()):
            yield from transfer.buffers

    def post(self, message: Message, boundaries: Sequence[BoundaryPlan]) -> None:
        """Start receiving ``message``; nothing happens if it is posted already or stays here."""
        if message in self._posted or self._is_local(message):
            return
        buffers = self.memory.received(message, boundaries)
        source = self.groups.rank_of_stage(message.sender)
        works = [
            dist.irecv(buffer, source, group=self._group(message), tag=self._tag(message, index, len(buffers)))
            for index, buffer in enumerate(buffers)
        ]
        self._posted[message] = _Transfer(buffers, works)

    def receive(self, message: Message, boundaries: Sequence[BoundaryPlan]) -> list[Tensor]:
        """The tensors of ``message``, once they are in: for "F" all values, for "B" the gradients of those with one."""
        if self._is_local(message):
            return self._handed.pop(message)
        self.post(message, boundaries)
        transfer = self._posted.pop(message)
        begun = self.waits.now()
        transfer.wait()
        self._free_what_was_used_before(message)
        self.waits.note(message, begun)
        return transfer.buffers

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Start sending; the buffers are held here until they are taken over."""
        if self._is_local(message):
            self._handed[message] = [tensor.detach() for tensor in tensors]
            return
        self._sending = {sent: transfer for sent, transfer in self._sending.items() if not transfer.is_done()}
        buffers = self.memory.sent(message, tensors)
        target = self.groups.rank_of_stage(message.receiver)
        works = [
            dist.isend(buffer, target, group=self._group(message), tag=self._tag(message, index, len(buffers)))
            for index, buffer in enumerate(buffers)
        ]
        self._sending[message] = _Transfer(buffers, works)

    def settle(self) -> None:
        """Wait until every send so far is taken over. Only where no rank can wait for this one meanwhile."""
        while self._sending:
            self._sending.pop(next(iter(self._sending))).wait()

    def drain(self) -> None:
        """Wait until every send of this step is taken over."""
        begun = self.waits.now()
        self.settle()
        self.waits.note(None, begun)
        assert not self._posted, f"posted but never used: {list(self._posted)}"
        assert not self._handed, f"handed over but never used: {list(self._handed)}"

    def forget(self) -> None:
        """Drop everything after a failure, so that a later error is not about leftovers."""
        self._posted, self._handed, self._sending = {}, {}, {}

    def _free_what_was_used_before(self, received: Message) -> None:
        """Free the sends that the sender of ``received`` had used when it sent it: they are through, no wait blocks."""
        for sent in self._progress.taken_over(self._sending, received):
            self._sending.pop(sent).wait()

    def _is_local(self, message: Message) -> bool:
        return message.link(self.groups.mesh.pp, self.groups.mesh.fold) is None

    def _group(self, message: Message) -> Any:
        link = message.link(self.groups.mesh.pp, self.groups.mesh.fold)
        assert link is not None, f"{message} stays on this rank"
        return self.groups.links[link] if self.groups.links else self.groups.pp

    def _tag(self, message: Message, index: int, count: int) -> int:
        """A number for each tensor of a step; a step's messages are all in before the next uses the numbers again."""
        position = (message.microbatch * self.num_stages + message.boundary) * 2 + (message.kind == "B")
        return position * count + index
