"""The number of tokens that chose each expert in a step, and of dropped ones: counted at the exchange of counts or the
sending of slots, summed with the figures of the step. Also whether any token chose an expert: counted at the choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ExpertLoad:
    """Owns ``figures`` of one rank's microbatches, on its device: how many tokens chose each expert of each layer
    (``sizes``: experts of each), then how many were dropped, of each layer that has a limit (``limits``: slots of each
    expert; 0: none are dropped, or the number is unknown). And of ``asked``: choices of the ``num_asked`` experts that
    rest without any; it does not matter which rank counts them.

    Only notes within a step count: ``begin`` to ``end``. A CUDA graph writes to the memory of its capture, so that
    memory stays.
    """

    def __init__(self, sizes: Sequence[int], limits: Sequence[int] = (), num_asked: int = 0) -> None:
        self.sizes, self.limits, self.num_asked = tuple(sizes), tuple(limits), num_asked
        self.figures: Tensor | None = None
        self.asked: Tensor | None = None
        self._counts: Tensor | None = None  # 1 in a step, else 0

    def begin(self, device: torch.device) -> None:
        if self.figures is None:
            size = sum(self.sizes) + sum(limit > 0 for limit in self.limits)
            self.figures = torch.zeros(size, dtype=torch.float64, device=device)
            self.asked = torch.zeros(self.num_asked, dtype=torch.float64, device=device)
            self._counts = torch.ones((), dtype=torch.float64, device=device)
        self.figures.zero_()
        self.asked.zero_()  # pyright: ignore[reportOptionalMemberAccess]
        self._counts.fill_(1)  # pyright: ignore[reportOptionalMemberAccess]

    def end(self) -> None:
        if self._counts is not None:
            self._counts.zero_()

    def note(self, layer: int, counts: Tensor) -> None:
        """``counts`` [.., experts]: of the rows that a layer routes in one microbatch, of each group that has slots."""
        if self.figures is None or self._counts is None or not self.sizes:
            return
        start, limit = sum(self.sizes[:layer]), self.limits[layer] if self.limits else 0
        self.figures[start : start + self.sizes[layer]] += counts.view(-1, self.sizes[layer]).sum(0) * self._counts
        if limit:
            place = sum(self.sizes) + sum(n > 0 for n in self.limits[:layer])
            self.figures[place] += (counts - limit).clamp(min=0).sum() * self._counts

    def note_choices(self, ids: Tensor, start: int) -> None:
        """``ids``: of experts, of any shape; their figures begin at ``start``."""
        if self.asked is not None and self._counts is not None:
            places = ids.reshape(-1).to(torch.int64) + start
            self.asked.index_add_(0, places, self._counts.expand(len(places)))


def note_choices(load: ExpertLoad, ids: Tensor, start: int) -> None:
    """As a call of a lowered graph."""
    load.note_choices(ids, start)
