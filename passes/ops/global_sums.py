"""Sums over the global batch that a loss needs before its first backward, counted by forwards of their own.

    begin(); all forwards of the step, without gradients; end()     totals[site] = Σ over microbatches and data ranks
    global_sum(share, sums, site)                                   totals[site]; its gradient times all microbatches

Every microbatch computes the same value of the totals and takes its share of it, 1/n. The value depends on the shares
of all n, so the gradient of one share is n times the gradient of its own microbatch's part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from passes.ops.axis import AxisHandle


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
        """The total; of a program that only planning runs, the share."""
        total = self.totals.get(site)
        return share.clone() if total is None else total.to(share.dtype, copy=True)


def global_sum(share: Tensor, sums: GlobalSums, site: str) -> Tensor:
    """Σ of the shares of the global batch, once they are counted."""
    if sums.is_counting:
        sums.count(site, share)
        return share
    return _Whole.apply(share, sums, site)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, sums: GlobalSums, site: str) -> Tensor:
        ctx.times = sums.data.size * sums.num_microbatches
        return sums.of(site, share)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.times, None, None
