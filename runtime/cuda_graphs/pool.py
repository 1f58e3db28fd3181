"""The memory of recorded graphs: blocks that are reused after their last tensor is freed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class Pool:
    """Memory that the graphs captured in it share. Owns: its blocks, and which of them hold something."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}
        self._in_use: dict[int, Place] = {}

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes() for block in self.blocks)

    def take(self, num_bytes: int) -> int:
        """The smallest free block that is large enough, or a new one."""
        free = [(block.nbytes(), i) for i, block in enumerate(self.blocks) if self.is_free(i)]
        found = min((entry for entry in free if entry[0] >= num_bytes), default=None)
        if found is not None:
            return found[1]
        self.blocks.append(torch.UntypedStorage(max(num_bytes, 1), device=self.device))
        self._numbers[self.blocks[-1]._cdata] = len(self.blocks) - 1
        return len(self.blocks) - 1

    def is_free(self, block: int) -> bool:
        """Whether the pool alone knows the block."""
        return torch._C._storage_Use_Count(self.blocks[block]._cdata) == 1  # pyright: ignore[reportAttributeAccessIssue]

    def place_of(self, tensor: Tensor) -> Place | None:
        """The place of a tensor in the pool; None if it is outside."""
        block = self._numbers.get(storage_of(tensor))
        if block is None:
            return None
        shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
        return Place(block, tensor.dtype, shape, tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())

    def keep(self, value: Tensor) -> Tensor:
        """``value`` in a block of the pool."""
        stride = torch.empty_like(value, device="meta").stride()  # dense, even if elements of value share memory
        extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, stride, strict=True)) if value.numel() else 0
        block = self.take(extent * value.element_size())
        place = self._in_use[block] = Place(block, value.dtype, tuple(value.shape), stride)
        kept = place.tensor(self)
        kept.copy_(value)
        return kept

    def let_go(self) -> list[Place]:
        """Frees the blocks that lost their last reference since the last call; returns their places."""
        return [self._in_use.pop(block) for block in list(self._in_use) if self.is_free(block)]


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of a pool, without holding it.

    ``is_conj``, ``is_neg``: it is a lazy conjugate or negative, a view of memory that holds the other values.
    """

    block: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    is_conj: bool = False
    is_neg: bool = False

    def tensor(self, pool: Pool) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=pool.device)
        tensor = empty.set_(pool.blocks[self.block], self.offset, self.shape, self.stride)
        tensor = tensor.conj() if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor


def storage_of(tensor: Tensor) -> int:
    """A number for the memory that a tensor is a view of."""
    return tensor.untyped_storage()._cdata
