"""Host memory for saves in the background: allocated by the first one, and reused by later ones.

    device    side stream: waits for the steps before, copies into pinned memory, passes an event
              steps: the update that overwrites copied memory waits for that event on the device; the host does not wait
    writer    waits for the event, then reads its own memory
    CPU       the same memory, pageable; the values are in it when ``take`` returns

A copy into pageable memory holds the host until it is through, so that no step is launched meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

# A power of two: the allocator of pinned memory rounds up to one. A larger tensor has memory of its own.
BLOCK_BYTES = 256 << 20
_ALIGNMENT = 64  # bytes


class InOrder:
    """The queue of copies for a CPU: they run at once."""

    def memory(self, num_bytes: int) -> Tensor:
        """Of the host, to copy into."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copying(self) -> AbstractContextManager[object]:
        """Inside, copies read values that were computed before."""
        return nullcontext()

    def hold(self) -> None:
        """Work that is queued from here on runs after the copies."""

    def wait(self) -> None:
        """Return when the copies are done."""


class SideStream(InOrder):
    """Of a CUDA device: a stream beside that of the steps, and the event behind its last copy. Owns both."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._copied = torch.cuda.Event()

    def memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def copying(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
            self._copied.record(self._stream)

    def hold(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def wait(self) -> None:
        self._copied.synchronize()


@dataclass
class _Block:
    memory: Tensor
    used: int = 0


class Staging:
    """Owns: blocks of host memory, and the queue of copies into them. One save at a time uses it."""

    def __init__(self, queue: InOrder) -> None:
        self._queue, self._blocks = queue, list[_Block]()
        self._is_copying = False

    @classmethod
    def on(cls, device: torch.device) -> Staging:
        return cls(SideStream(device) if device.type == "cuda" else InOrder())

    @property
    def num_bytes(self) -> int:
        return sum(len(block.memory) for block in self._blocks)

    def take(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Begin to copy: the same values in host memory, to be read after ``wait`` and until the next call."""
        tensors = [tensor.detach() for tensor in tensors]
        for block in self._blocks:
            block.used = 0
        left, places = sum(_room(tensor) for tensor in tensors), []
        for tensor in tensors:
            places.append(self._place(tensor, left))
            left -= _room(tensor)
        with self._queue.copying():
            for place, tensor in zip(places, tensors, strict=True):
                place.copy_(tensor, non_blocking=True)
        self._is_copying = True
        return places

    def hold(self) -> None:
        """Call this before overwriting copied memory: work that is queued afterwards runs after the copies."""
        if self._is_copying:
            self._queue.hold()
            self._is_copying = False

    def wait(self) -> None:
        """Return when the values are in host memory."""
        self._queue.wait()

    def _place(self, tensor: Tensor, left: int) -> Tensor:
        """``left``: bytes that are still to be placed, this tensor's among them."""
        room = _room(tensor)
        block = next((block for block in self._blocks if len(block.memory) - block.used >= room), None)
        if block is None:
            block = _Block(self._queue.memory(max(room, min(left, BLOCK_BYTES))))
            self._blocks.append(block)
        start, block.used = block.used, block.used + room
        return block.memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
