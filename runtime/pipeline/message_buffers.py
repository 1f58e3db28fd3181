"""Memory of messages between stages: fresh memory, or static buffers in rotation.

If a step is captured as one CUDA graph, memory used by NCCL is not reused inside it: the allocator does not know when
another stream has finished. Static buffers are allocated before, and the plan assigns messages to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from passes.program.stages import BoundaryPlan
from planner.pipeline.links import Message
from planner.pipeline.message_slots import Ring, message_slots, ring_of, ring_sizes
from planner.pipeline.schedule import Order
from planner.sharding.boundaries import crossing, one_way
from runtime.distributed.groups import Groups


class MessageBuffers(Protocol):
    """Gives the tensors of one message; those of a sent one have its values, contiguous."""

    def received(self, message: Message, boundaries: Sequence[BoundaryPlan]) -> list[Tensor]: ...

    def sent(self, message: Message, tensors: Sequence[Tensor]) -> list[Tensor]: ...


class FreshBuffers:
    """New memory for each received message; a sent tensor is not copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def received(self, message: Message, boundaries: Sequence[BoundaryPlan]) -> list[Tensor]:
        return made(crossing(boundaries, message.kind), self._device)

    def sent(self, message: Message, tensors: Sequence[Tensor]) -> list[Tensor]:
        # gloo and NCCL read the memory as it lies: a transposed view would arrive scrambled.
        return [tensor.detach().contiguous() for tensor in tensors]


class StaticBuffers:
    """Owns: the buffers of each ring. A sent tensor is copied into one."""

    def __init__(self, boundaries: Sequence[Sequence[BoundaryPlan]], orders: Sequence[Order], groups: Groups) -> None:
        """``boundaries``: of each boundary of the pipeline, those that this rank has no end of may be empty."""
        mesh, num_stages = groups.mesh, len(boundaries) + 1
        self._slots = message_slots(orders, groups.pp_rank, num_stages, mesh.fold, one_way(boundaries))
        self._rings: dict[Ring, list[list[Tensor]]] = {
            ring: [made(crossing(boundaries[ring.boundary], ring.kind), groups.device) for _ in range(count)]
            for ring, count in ring_sizes(self._slots).items()
        }

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for ring in self._rings.values() for buffers in ring for tensor in buffers]

    def received(self, message: Message, boundaries: Sequence[BoundaryPlan]) -> list[Tensor]:
        """As leaves of their own: a buffer has another gradient for each microbatch."""
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
