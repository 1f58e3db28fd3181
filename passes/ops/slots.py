"""Slots on their way to experts and back: equally many from every rank for any routing, so the host waits for nothing.

    all slots [E, C, h] → this tp rank's share [E, c, h] → ep: all-to-all [E / ep, ep · c, h] → etp: all-gather

and back: reduce-scatter, all-to-all, the share at its place. c = ceil(C / tp): if tp does not divide C, copies of the
last slot fill up, and their results are dropped, so their gradient is zero.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from passes.ops.axis import AxisHandle, Way, has_values, own_part
from passes.ops.collectives import gather, note, part, scatter
from passes.ops.counts import ExpertLoad
from passes.types.types import V, evenly


def send_slots(
    x: Tensor,
    experts: int,
    slots: int,
    counts: Tensor | None,
    tp: AxisHandle,
    ep: AxisHandle,
    etp: AxisHandle,
    load: ExpertLoad,
    layer: int,
) -> Tensor:
    """``experts``, ``slots``: dims of x, replicated on all ranks of tp → the slots of all ranks for this rank's
    experts.

    ``counts`` [groups, E], given once a ``layer``: the number of tokens of each group with slots that chose each
    expert.
    """
    if counts is not None and has_values(counts) and ep.phase is None:  # a recomputation counts nothing again
        load.note(layer, counts)
    came = _trade(share_of(x, slots, tp), ep, experts, slots)
    return gather(came, etp, V(slots, came.shape[slots] * etp.size)) if etp.size > 1 else came


def return_slots(
    x: Tensor, experts: int, slots: int, tp: AxisHandle, ep: AxisHandle, etp: AxisHandle, size: int
) -> Tensor:
    """Return the results of the slots; of ``size`` slots those that this rank sent, zeros at the others' places."""
    own = scatter(x, etp, V(slots, x.shape[slots])) if etp.size > 1 else x
    return placed(_trade(own, ep, slots, experts), slots, tp, size)


def share_of(x: Tensor, dim: int, tp: AxisHandle) -> Tensor:
    """This tp rank's share of slots that all tp ranks have."""
    return part(x, evenly(dim, x.shape[dim], tp.size), tp.size, tp.rank)


def placed(own: Tensor, dim: int, tp: AxisHandle, size: int) -> Tensor:
    """Return its share among ``size`` slots, zeros elsewhere."""
    if tp.size == 1:
        return own
    start, count = own_part(own.shape[dim], tp, size)
    beyond = min(start, size), max(0, size - start - count)
    before, after = (own.new_zeros([n if d == dim else m for d, m in enumerate(own.shape)]) for n in beyond)
    return torch.cat([before, own.narrow(dim, 0, count), after], dim)


def _trade(x: Tensor, axis: AxisHandle, split: int, joined: int) -> Tensor:
    """Send every rank its part of one dim; the received parts are concatenated along another."""
    if axis.size == 1:
        return x
    there = partial(_exchanged, axis=axis, split=split, joined=joined, phase="forward")
    return Way.apply(x, there, partial(_exchanged, axis=axis, split=joined, joined=split, phase="backward"))


def _exchanged(x: Tensor, axis: AxisHandle, split: int, joined: int, phase: str) -> Tensor:
    note(axis, "all_to_all", phase, x)
    sent = torch.stack(x.chunk(axis.size, split))
    received = torch.empty_like(sent)
    if has_values(x):
        dist.all_to_all_single(received, sent, group=axis.group)
    return torch.cat(received.unbind(0), joined)
