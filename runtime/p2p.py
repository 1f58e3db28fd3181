"""Boundary tensors: what crosses from one stage to the next, and its gradient on the way back.

Boundary i lies between stage i and stage i + 1. A message is all tensors of one boundary for one microbatch in one
direction: "F" carries values down, "B" gradients up. Receives are posted ahead of their use, so that gloo and NCCL fill
the buffer while the rank computes. Stages on the same rank hand their tensors over directly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from passes.base import Boundary
from runtime.groups import Groups

MAX_SENDS_IN_FLIGHT = 4  # messages a direction whose buffers are still held; more wait for the oldest


class Message(NamedTuple):
    """What is sent: values ("F") or gradients ("B") of the boundary below stage ``boundary``, for one microbatch."""

    kind: str
    boundary: int
    microbatch: int

    @property
    def sender(self) -> int:
        return self.boundary if self.kind == "F" else self.boundary + 1

    @property
    def receiver(self) -> int:
        return self.boundary + 1 if self.kind == "F" else self.boundary


class Transport:
    """Exchanges messages with the neighbouring stages.

    Owns: the receive buffers posted ahead, the send buffers not yet taken over, and messages handed over on this rank.
    """

    def __init__(self, groups: Groups, num_stages: int) -> None:
        self.groups = groups
        self.num_stages = num_stages
        self._posted: dict[Message, tuple[list[Tensor], list[Any]]] = {}
        self._handed: dict[Message, list[Tensor]] = {}
        self._sending: dict[str, deque[tuple[list[Tensor], list[Any]]]] = {"F": deque(), "B": deque()}

    def post(self, message: Message, boundaries: Sequence[Boundary]) -> None:
        """Start receiving ``message`` into fresh buffers; nothing happens if it is posted already or stays here."""
        if message in self._posted or self._is_local(message):
            return
        buffers = [
            torch.empty(b.shape, dtype=b.dtype, device=self.groups.device) for b in _crossing(message, boundaries)
        ]
        source = self.groups.rank_of_stage(message.sender)
        works = [
            dist.irecv(buffer, source, group=self._group(message), tag=self._tag(message, index, len(buffers)))
            for index, buffer in enumerate(buffers)
        ]
        self._posted[message] = (buffers, works)

    def receive(self, message: Message, boundaries: Sequence[Boundary]) -> list[Tensor]:
        """The tensors of ``message``, once they are in: for "F" all values, for "B" the gradients of those with one."""
        if self._is_local(message):
            return self._handed.pop(message)
        self.post(message, boundaries)
        buffers, works = self._posted.pop(message)
        for work in works:
            work.wait()
        return buffers

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Start sending; the buffers are held here until they are taken over."""
        if self._is_local(message):
            self._handed[message] = [tensor.detach() for tensor in tensors]
            return
        sending = self._sending[message.kind]
        while len(sending) >= MAX_SENDS_IN_FLIGHT:
            _finish(sending.popleft())
        # gloo and NCCL read the memory as it lies: a transposed view would arrive scrambled.
        buffers = [tensor.detach().contiguous() for tensor in tensors]
        target = self.groups.rank_of_stage(message.receiver)
        works = [
            dist.isend(buffer, target, group=self._group(message), tag=self._tag(message, index, len(buffers)))
            for index, buffer in enumerate(buffers)
        ]
        sending.append((buffers, works))

    def drain(self) -> None:
        """Wait until every send of this step is taken over."""
        for sending in self._sending.values():
            while sending:
                _finish(sending.popleft())
        assert not self._posted, f"posted but never used: {list(self._posted)}"
        assert not self._handed, f"handed over but never used: {list(self._handed)}"

    def forget(self) -> None:
        """Drop everything after a failure, so that a later error is not about leftovers."""
        self._posted, self._handed = {}, {}
        self._sending = {"F": deque(), "B": deque()}

    def _is_local(self, message: Message) -> bool:
        pp = self.groups.mesh.pp
        return message.sender % pp == message.receiver % pp

    def _group(self, message: Message) -> Any:
        pp = self.groups.mesh.pp
        link = (message.sender % pp, message.receiver % pp, message.kind)
        return self.groups.links.get(link, self.groups.pp)

    def _tag(self, message: Message, index: int, count: int) -> int:
        """A number for each tensor of a step; a step's messages are all in before the next uses the numbers again."""
        position = (message.microbatch * self.num_stages + message.boundary) * 2 + (message.kind == "B")
        return position * count + index


def _crossing(message: Message, boundaries: Sequence[Boundary]) -> list[Boundary]:
    return [b for b in boundaries if message.kind == "F" or b.requires_grad]


def _finish(sending: tuple[list[Tensor], list[Any]]) -> None:
    for work in sending[1]:
        work.wait()
