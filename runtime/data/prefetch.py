"""Batches made ahead by a thread, while a step runs."""

from __future__ import annotations

import queue
import threading
from typing import Self

from torch import Tensor

from runtime.data.token_batches import Batches

_AHEAD = 2  # batches that wait


class Prefetched:
    """The batches of ``batches`` from step ``first`` to before ``stop``, in their order; any other is made on request.

    Owns the thread, from ``with`` on. The request for a batch raises the thread's error.
    """

    def __init__(self, batches: Batches, first: int, stop: int) -> None:
        self.batches, self._steps = batches, range(first, stop)
        # neither of the two makes the asker wait for the interpreter, as queue.Queue does: a batch takes less than that
        self._made: queue.SimpleQueue[dict[str, Tensor] | BaseException] = queue.SimpleQueue()
        self._room = threading.Semaphore(_AHEAD)
        self._is_closed = False
        self._next = first
        self._thread = threading.Thread(target=self._make, name="batches", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_closed = True
        self._room.release()
        self._thread.join()

    def batch(self, step: int) -> dict[str, Tensor]:
        """The global batch of a step."""
        if step != self._next or step not in self._steps or not self._thread.ident:
            return self.batches.batch(step)
        made = self._made.get()
        if isinstance(made, BaseException):
            raise made
        self._next = step + 1
        self._room.release()
        return made

    def _make(self) -> None:
        for step in self._steps:
            self._room.acquire()
            if self._is_closed:
                return
            try:
                self._made.put(self.batches.batch(step))
            except BaseException as error:  # raised by the request for the batch
                self._made.put(error)
                return
