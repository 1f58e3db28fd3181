"""The number of tokens that chose each expert in a step, and of dropped ones: counted at the exchange of counts or the
sending of slots, summed with the figures of the step. Also whether any token chose an expert: counted at the choice.

And sums over the global batch that a loss needs before its first backward, counted by forwards of their own:

    begin(); all forwards of the step, without gradients; end()     totals[site] = Σ over microbatches and data ranks
    global_sum(share, sums, site)                                   totals[site]; its gradient times all microbatches

Every microbatch computes the same value of the totals and takes its share of it, 1/n. The value depends on the shares
of all n, so the gradient of one share is n times the gradient of its own microbatch's part.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from passes.ops.axis import AxisHandle, Way


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

    @property
    def num_figures(self) -> int:
        """That a step sums, asked ones too."""
        return sum(self.sizes) + sum(limit > 0 for limit in self.limits) + self.num_asked

    def begin(self, device: torch.device) -> None:
        if self.figures is None:
            self.figures = torch.zeros(self.num_figures - self.num_asked, dtype=torch.float64, device=device)
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
        """Count choices, as a call of a lowered graph."""
        if self.asked is not None and self._counts is not None:
            places = ids.reshape(-1).to(torch.int64) + start
            self.asked.index_add_(0, places, self._counts.expand(len(places)))


def note_choices(load: ExpertLoad, ids: Tensor, start: int) -> None:
    """Count choices, as a call of a lowered graph."""
    load.note_choices(ids, start)


class GlobalSums:
    """Owns the totals of a rank, by site, in float64: in memory that stays, since a CUDA graph reads it.

    ``data``: the axis of ranks with other tokens. ``num_microbatches``: that each of them runs in a step.
    """

    def __init__(self, data: AxisHandle, num_microbatches: int) -> None:
        self.data, self.num_microbatches = data, num_microbatches
        self.totals: dict[str, Tensor] = {}
        self.is_counting = False

    def begin(self) -> None:
        self.is_counting = True
        for total in self.totals.values():
            total.zero_()

    def end(self) -> None:
        """Sum over the data ranks: each has the same sites, and joins them in one message."""
        self.is_counting = False
        if self.data.size == 1 or not self.totals:
            return
        totals = [self.totals[site] for site in sorted(self.totals)]
        flat = torch.cat([total.view(-1) for total in totals])
        self.data.note("all_reduce", "step", flat.numel() * flat.element_size())
        dist.all_reduce(flat, group=self.data.group)
        for total, found in zip(totals, flat.split([t.numel() for t in totals]), strict=True):
            total.copy_(found.view_as(total))

    def count(self, site: str, share: Tensor) -> None:
        if site not in self.totals:
            self.totals[site] = torch.zeros_like(share, dtype=torch.float64)
        self.totals[site] += share

    def of(self, site: str, share: Tensor) -> Tensor:
        """Return the total; of a program that only planning runs, the share."""
        total = self.totals.get(site)
        return share.clone() if total is None else total.to(share.dtype, copy=True)


def global_sum(share: Tensor, sums: GlobalSums, site: str) -> Tensor:
    """Return Σ of the shares of the global batch, once they are counted."""
    if sums.is_counting:
        sums.count(site, share)
        return share
    times = sums.data.size * sums.num_microbatches
    return Way.apply(share, partial(sums.of, site), lambda gradient: gradient * times)
