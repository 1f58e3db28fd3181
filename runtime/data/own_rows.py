"""Of each global batch the rows of one dp rank alone: the others are neither read nor made here.

dp rank d     rows [d·G/dp, (d+1)·G/dp), which ``train_step(batch, local=True)`` takes
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from runtime.data.batches import BatchLayout


class BatchesByRows(Protocol):
    """Global batches by step, or some rows of them: a pure function, the same on every rank."""

    def batch(self, step: int, rows: slice | None = None) -> dict[str, Tensor]: ...
    def size_of(self, step: int) -> int: ...


class OwnRows:
    """The batches of one rank; ``is_local``: whether they are less than the global ones."""

    def __init__(self, batches: BatchesByRows, layout: BatchLayout) -> None:
        self.batches, self.is_local = batches, layout.dp > 1
        self._ranks, self._rank = layout.dp, layout.dp_rank

    def batch(self, step: int) -> dict[str, Tensor]:
        """This rank's rows of a step."""
        if not self.is_local:
            return self.batches.batch(step)
        size = self.batches.size_of(step) // self._ranks
        return self.batches.batch(step, slice(self._rank * size, (self._rank + 1) * size))
