"""Boundary tensors: activations sent from one stage to the next, their gradients sent back, and the waits for them.

Boundary i lies between stage i and stage i + 1. A message is all tensors of one boundary for one microbatch in one
direction: "F" carries values down, "B" gradients up (``planner.pipeline.links``). Receives are posted ahead of their
use, so that gloo and NCCL fill the buffer while the rank computes. Stages on one rank pass their tensors directly.

A step does not wait for its sends: with a large interleaved group, both neighbours send many messages before either
receives the first of them, and would wait for each other. A sent buffer is freed once its peer has received it:

    the backend reports it (NCCL), or
    a message of the peer arrives from an action at or after the one that used the buffer     (gloo never reports it)

Messages lie in fresh memory, or in static buffers in rotation. If a step is captured as one CUDA graph, the allocator
cannot reuse memory of NCCL inside it, because it does not know when another stream has finished. Static buffers are
allocated before, and the plan assigns messages to them.

The waits of a run, from the first action to the end of the last sends, give the pipeline's bubble
(runtime.report.step_report.bubble_of). Times on a GPU come from events, for which the host does not wait: it reports
the newest run that the device has finished.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from statistics import median_low
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from passes.interceptors import installed
from passes.program.program import BoundaryPlan
from planner.pipeline.links import Message, Progress
from planner.pipeline.message_slots import Ring, message_slots, ring_of, ring_sizes
from planner.pipeline.schedule import Order
from planner.sharding.shards import crossing, one_way
from runtime.distributed.groups import Groups
from runtime.distributed.marks import Mark, Marks

_USUAL = 5  # the usual time is the median of this number of runs


class _Transfer(NamedTuple):
    """Buffers in flight, and the works that complete them."""

    buffers: list[Tensor]
    works: list[Any]

    def is_done(self) -> bool:
        """Return whether all works have completed; False during the capture of a graph, before any work runs."""
        if self.buffers and self.buffers[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class FreshBuffers:
    """Provides the tensors of messages: new memory for each received one, the contiguous tensors of a sent one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def received(self, message: Message, boundaries: Sequence[BoundaryPlan]) -> list[Tensor]:
        return made(crossing(boundaries, message.kind), self._device)

    def sent(self, message: Message, tensors: Sequence[Tensor]) -> list[Tensor]:
        # gloo and NCCL ignore strides: a transposed view would arrive scrambled
        return [tensor.detach().contiguous() for tensor in tensors]


class StaticBuffers(FreshBuffers):
    """Owns the buffers of each ring. A sent tensor is copied into one of them."""

    def __init__(self, boundaries: Sequence[Sequence[BoundaryPlan]], orders: Sequence[Order], groups: Groups) -> None:
        """``boundaries``: the values of each boundary of the pipeline; may be empty for one without a stage here."""
        mesh, num_stages = groups.mesh, len(boundaries) + 1
        self._slots = message_slots(orders, groups.place["pp"], num_stages, mesh.fold, one_way(boundaries))
        self._rings: dict[Ring, list[list[Tensor]]] = {
            ring: [made(crossing(boundaries[ring.boundary], ring.kind), groups.device) for _ in range(count)]
            for ring, count in ring_sizes(self._slots).items()
        }

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for ring in self._rings.values() for buffers in ring for tensor in buffers]

    def received(self, message: Message, boundaries: Sequence[BoundaryPlan]) -> list[Tensor]:
        """Return new leaves, because a buffer has another gradient for each microbatch."""
        return [buffer.detach() for buffer in self._of(True, message)]

    def sent(self, message: Message, tensors: Sequence[Tensor]) -> list[Tensor]:
        buffers = self._of(False, message)
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor.detach())
        return buffers

    def _of(self, is_received: bool, message: Message) -> list[Tensor]:
        return self._rings[ring_of(is_received, message)][self._slots[is_received, message]]


def made(boundaries: Sequence[BoundaryPlan], device: torch.device) -> list[Tensor]:
    return [torch.empty(b.shape, dtype=getattr(torch, b.dtype), device=device) for b in boundaries]


class Transport:
    """Exchanges messages with the neighbouring stages.

    Owns the receive buffers posted ahead, the send buffers still in use, messages between stages of this rank, and the
    ``waits`` for other ranks. ``memory``: provides the buffers of messages.
    """

    def __init__(self, groups: Groups, num_stages: int, orders: Sequence[Order] = ()) -> None:
        """``orders``: the actions of every pp rank; without them, a message frees no earlier sends."""
        self.groups = groups
        self.num_stages = num_stages
        self.orders = tuple(orders)
        self.memory = FreshBuffers(groups.device)
        self.waits = Waits(Marks(groups.device), num_ranks=groups.mesh.pp, is_alone=groups.mesh.world_size == 1)
        self._progress = Progress(orders, groups.mesh.fold)
        self._posted: dict[Message, _Transfer] = {}
        self._handed: dict[Message, list[Tensor]] = {}
        self._sending: dict[Message, _Transfer] = {}

    def lying_in(self, memory: FreshBuffers) -> AbstractContextManager[None]:
        """Return a context in which messages lie in ``memory``."""
        return installed((self, "memory", memory))

    @property
    def buffers(self) -> Iterator[Tensor]:
        """Tensors of all messages in transit, in both directions, and of those between stages of this rank."""
        for handed in self._handed.values():
            yield from handed
        for transfer in (*self._posted.values(), *self._sending.values()):
            yield from transfer.buffers

    def post(self, message: Message, boundaries: Sequence[BoundaryPlan]) -> None:
        """Start receiving ``message``, unless it is posted already or comes from this rank."""
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
        """Wait for ``message`` and return its tensors: for "F" all values, for "B" the gradients."""
        if self._is_local(message):
            return self._handed.pop(message)
        self.post(message, boundaries)
        transfer = self._posted.pop(message)
        begun = self.waits.now()
        transfer.wait()
        for sent in self._progress.taken_over(self._sending, message):  # its sender has received them: no wait blocks
            self._sending.pop(sent).wait()
        self.waits.note(message, begun)
        return transfer.buffers

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Start sending; the buffers are held here until the peer has received them."""
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
        """Wait until every send so far is received. Only allowed if no rank can wait for this one meanwhile."""
        while self._sending:
            self._sending.pop(next(iter(self._sending))).wait()

    def drain(self) -> None:
        """Wait until every send of this step is received."""
        begun = self.waits.now()
        self.settle()
        self.waits.note(None, begun)
        assert not self._posted, f"posted but never used: {list(self._posted)}"
        assert not self._handed, f"handed over but never used: {list(self._handed)}"

    def forget(self) -> None:
        """Drop all messages after a failure, so that they cause no later error."""
        self._posted, self._handed, self._sending = {}, {}, {}

    def _is_local(self, message: Message) -> bool:
        return message.link(self.groups.mesh.pp, self.groups.mesh.fold) is None

    def _group(self, message: Message) -> Any:
        link = message.link(self.groups.mesh.pp, self.groups.mesh.fold)
        assert link is not None, f"{message} stays on this rank"
        return self.groups.over(link) or self.groups.over("pp")

    def _tag(self, message: Message, index: int, count: int) -> int:
        """Return the number of a tensor in a step; all messages of a step arrive before the next reuses the numbers."""
        position = (message.microbatch * self.num_stages + message.boundary) * 2 + (message.kind == "B")
        return position * count + index


class Wait(NamedTuple):
    """A wait for ``message``; None: for the last sends."""

    message: Message | None
    start: Mark
    end: Mark


class _Run(NamedTuple):
    start: Mark
    end: Mark
    waits: list[Wait]


class Waits:
    """Owns the waits of the current run, and the runs that the device has not finished.

    ``num_ranks``: of the pipeline; 1: there is no bubble. ``is_alone``: of a single process no times are measured.
    ``latest``: the waits of the newest run.
    """

    def __init__(self, marks: Marks, *, num_ranks: int = 2, is_alone: bool = False) -> None:
        self.marks, self.num_ranks, self.is_alone = marks, num_ranks, is_alone
        self.latest: list[Wait] = []
        self._start: Mark | None = None
        self._runs: deque[_Run] = deque(maxlen=8)
        self._newest = 0.0, 0.0
        self._works: deque[float] = deque(maxlen=_USUAL)
        self._is_new = False

    def begin(self) -> None:
        """Note the start of a run."""
        self.latest = []
        self._start = None if self.is_alone or not self.marks.can_be_set() else self.marks.now()

    def now(self) -> Mark | None:
        """Return the start of a wait; None outside of a measured run."""
        return None if self._start is None else self.marks.now()

    def note(self, message: Message | None, start: Mark | None) -> None:
        """Note the end of a wait that began at ``start``."""
        if start is not None:
            self.latest.append(Wait(message, start, self.marks.now()))

    def end(self) -> None:
        """Note the end of the run."""
        if self._start is not None:
            self._runs.append(_Run(self._start, self.marks.now(), self.latest))
            self._start, self._is_new = None, True

    def newest(self) -> tuple[float, float]:
        """Return the seconds of work, and in all, of the newest run that the device has finished.

        Called once a step; 0 if no new run was measured, or the pipeline has one rank.
        """
        if not self._is_new or self.num_ranks == 1:
            return 0.0, 0.0
        self._is_new = False
        self._read()
        return self._newest

    def usual(self) -> float:
        """Return the median seconds of work in the last runs; 0 before there are enough."""
        self._read()
        return median_low(self._works) if len(self._works) == _USUAL else 0.0

    def _read(self) -> None:
        """Take the times of the runs that the device has finished."""
        while self._runs and self.marks.is_past(self._runs[0].end):
            start, end, waits = self._runs.popleft()
            run = self.marks.seconds(start, end)
            self._newest = run - sum(self.marks.seconds(wait.start, wait.end) for wait in waits), run
            self._works.append(self._newest[0])
