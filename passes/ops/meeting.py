"""What a layer's ranks know of each other's routing, and the two ways of rows that follow from it.

    all rows by expert → this tp rank's share → ep: to the ranks of their experts → etp: to all who hold a part

and back. A share is the rows [r · n // tp, (r + 1) · n // tp): all tp ranks have the same rows, and each sends its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from passes.ops import experts
from passes.ops.axis import AxisHandle
from passes.ops.experts import Splits
from passes.ops.load import ExpertLoad


@dataclass(frozen=True)
class Meeting:
    """One routing of one layer. ``to_experts``, ``to_parts``: splits over ep and over etp; ``counts``: [E / ep] of the
    rows that are here then. ``share``: half-open, of ``num_rows`` rows."""

    ep: AxisHandle
    etp: AxisHandle
    num_rows: int
    share: tuple[int, int]
    to_experts: Splits
    to_parts: Splits | None
    counts: Tensor


def meet(
    counts: Tensor, num_rows: int, tp: AxisHandle, ep: AxisHandle, etp: AxisHandle, load: ExpertLoad, layer: int
) -> Meeting:
    """``counts`` [E]: rows of each expert, the same on all tp ranks. The host waits here, and only here."""
    load.note(layer, counts)
    ends = counts.cumsum(0)
    share = tp.rank * num_rows // tp.size, (tp.rank + 1) * num_rows // tp.size
    own = (ends.clamp(max=share[1]) - (ends - counts).clamp(min=share[0])).clamp(min=0)
    to_experts = experts.splits_of(own, ep)
    to_parts = experts.spread_splits(to_experts.counts, etp) if etp.size > 1 else None
    here = to_experts.counts if to_parts is None else to_parts.counts
    return Meeting(ep, etp, num_rows, share, to_experts, to_parts, here)


def dispatch(rows: Tensor, here: Meeting) -> Tensor:
    """All rows by expert [n, …] → the rows of this rank's experts, by expert."""
    start, stop = here.share
    came = experts.dispatch(rows[start:stop], here.to_experts, here.ep)
    return came if here.to_parts is None else experts.spread_rows(came, here.to_parts, here.etp)


def give_back(rows: Tensor, here: Meeting) -> Tensor:
    """What became of them → [n, …]: this rank's share at its place, zeros at the others'."""
    whole = rows if here.to_parts is None else experts.gather_in(rows, here.to_parts, here.etp)
    own = experts.give_back(whole, here.to_experts, here.ep)
    start, stop = here.share
    if stop - start == here.num_rows:
        return own
    before, after = (own.new_zeros(n, *own.shape[1:]) for n in (start, here.num_rows - stop))
    return torch.cat([before, own, after])


def grouped_mm(rows: Tensor, weights: Tensor, here: Meeting) -> Tensor:
    """The rows of each expert of this rank times its own matrix, weights [E / ep, i, o]."""
    sizes = (here.to_experts if here.to_parts is None else here.to_parts).sizes
    return torch.cat([x @ w for x, w in zip(rows.split(sizes), weights, strict=True)])


def part(rows: Tensor, here: Meeting, number: int) -> Tensor:
    """The rows of one expert of this rank."""
    sizes = (here.to_experts if here.to_parts is None else here.to_parts).sizes
    start = sum(sizes[:number])
    return rows[start : start + sizes[number]]


def join(*parts: Tensor, dim: int = 0) -> Tensor:
    """The rows of all experts of this rank, by expert; or their slots."""
    return torch.cat(parts, dim)


def ends_of(here: Meeting, dtype: torch.dtype) -> Tensor:
    """Where the rows of each expert of this rank end."""
    return here.counts.cumsum(0).to(dtype)


def ids_of(here: Meeting, num_rows: int) -> Tensor:
    """The expert of each row, counted from this rank's first."""
    numbers = torch.arange(len(here.counts), device=here.counts.device)
    return numbers.repeat_interleave(here.counts)
