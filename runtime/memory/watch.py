"""Looks at the memory of a rank while it runs the actions of a step, as live tensors have it.

    live    all memory that was made in a forward, a backward, or for a message, and that still lives
    kept    the part that lives between two actions, except messages in flight: tensors saved by autograd, inputs of a
            recomputation, received values before their backward, and tensors that a backward saves for its W

Memory is known by its storage, so views count once. Weights, buffers, batches and gradients were there before and
are not counted. Workspaces inside kernels are not seen, nor what a compiled piece makes and does not save.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from planner.pipeline.schedule import Action
from planner.saved.allocations import Allocations
from runtime.pipeline.executor import Executor, Step

SETTLING_SECONDS = (0.005, 0.02)


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes while an action ran: ``kept`` for all microbatches in flight, its own among them; ``live`` at its peak."""

    action: str
    kept: int
    live: int


class MemoryWatch:
    """Owns the ``moments`` of a step, one for each action."""

    def __init__(self, executor: Executor, outside: Iterable[Tensor]) -> None:
        """``outside``: tensors that are not counted; microbatches are not either."""
        self.executor = executor
        self.moments: list[Moment] = []
        self._outside = {t.untyped_storage()._cdata: t for t in outside}  # alive, so that no other takes their place
        self._allocations = Allocations(self._outside.values(), settling=SETTLING_SECONDS[0])
        self._saved: dict[int, tuple[StorageWeakRef, int]] = {}
        gc.collect()
        gc.freeze()  # so that later collections are fast

    @contextmanager
    def around(self, action: Action, step: Step) -> Iterator[None]:
        self._allocations.know(t for microbatch in step.microbatches for t in microbatch.values())
        before = self._kept() if action.kind != "F" else 0
        self._allocations.peak = 0
        with self._allocations, torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield
        kept = before if action.kind != "F" else self._kept()
        self.moments.append(Moment(str(action), kept, max(self._allocations.peak, self._allocations.live)))

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._outside:
            self._saved[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return tensor

    def _kept(self) -> int:
        """The smallest of a few readings: gloo's thread holds the tensor of a collective a moment longer than its work
        is waited for."""
        gc.collect()  # of Python's cycles nothing is kept
        readings = [self._held_bytes()]
        for seconds in SETTLING_SECONDS:
            time.sleep(seconds)
            readings.append(self._held_bytes())
        return min(readings)

    def _held_bytes(self) -> int:
        """A message that is saved too, as a value that the next stage gets, is kept."""
        known = self._allocations.known
        saved = {m: size for m, (storage, size) in self._saved.items() if not storage.expired() and m not in known}
        living = saved | self._allocations.living  # of compiled pieces only saved tensors are seen
        saved = set(saved)
        for of_microbatch in self.executor.in_flight:
            saved |= {t.untyped_storage()._cdata for t in of_microbatch.received}
        holders = Counter(t.untyped_storage()._cdata for t in self.executor.transport.buffers)
        under_way = {memory for memory, count in holders.items() if not _is_held(memory, count)} - saved
        return sum(size for memory, size in living.items() if memory not in under_way)


def _is_held(memory: int, num_buffers: int) -> bool:
    """Whether it has a reference besides the message buffers and Python's own object: an input of a recomputation."""
    return torch._C._storage_Use_Count(memory) > num_buffers + 1
