"""The exchanges of rows (token, choice), sorted by expert, through experts: each is a function.

    dispatch     rows → rows of this rank's experts                                                      all-to-all
    spread_rows  rows of one etp rank → of all of them, each of which has a part of every expert         all-gather
    gather_in    their parts of the results, summed on the rows' own ranks                               reduce-scatter
    give_back    the reverse of dispatch

The numbers of rows that a rank sends and receives depend on the routing: the host waits for it in ``on_host``, once a
layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from passes.ops.axis import AxisHandle, Way
from passes.ops.collectives import note

Tensor = torch.Tensor
_Move = Callable[..., Tensor]  # rows, splits, axis, phase → rows


@dataclass(frozen=True, slots=True)
class Splits:
    """How many rows go to and come from each rank, and the order that brings those that came by expert.

    ``counts``, and ``sizes`` on the host: how many each expert of this rank then has.
    """

    sent: list[int]
    received: list[int]
    order: Tensor
    counts: Tensor
    sizes: list[int]

    @classmethod
    def over_ep(cls, sent: list[list[int]], came: list[list[int]], received: Tensor) -> Splits:
        """``sent`` [ep][E / ep]: of this rank's rows. ``came``, ``received`` [ep, E / ep]: of this rank's experts, by
        their sender."""
        sizes = [sum(column) for column in zip(*came, strict=True)]
        order = _by_expert(received, sum(sizes))
        return cls([sum(row) for row in sent], [sum(row) for row in came], order, received.sum(0), sizes)

    @classmethod
    def over_etp(cls, came: list[list[int]], every: Tensor, rank: int) -> Splits:
        """``came``, ``every`` [etp, E / ep]: of the rows that each of its ranks has."""
        sizes = [sum(column) for column in zip(*came, strict=True)]
        received = [sum(row) for row in came]
        return cls([received[rank]] * len(came), received, _by_expert(every, sum(sizes)), every.sum(0), sizes)


@dataclass(frozen=True, slots=True)
class Figures:
    """What ranks say of their rows beside the counts, [ep, …]: this rank to each, on the host, and each to this rank,
    on both. ``rows`` [ep]: how many come from each."""

    rows: Tensor
    came: Tensor
    sent_here: list[list[int]]
    came_here: list[list[int]]

    @property
    def here(self) -> tuple[list[list[int]], list[list[int]]]:
        return self.sent_here, self.came_here


def splits_of_both(
    counts: Tensor, ep: AxisHandle, etp: AxisHandle, figures: Tensor | None = None
) -> tuple[Splits, Splits | None, Figures]:
    """Exchange the row counts over ep, then over etp. The host waits once, for both.

    ``counts`` [E]: of this rank's rows. ``figures`` [ep, …] go with them.
    """
    each = len(counts) // ep.size
    sent = counts.view(ep.size, each) if figures is None else torch.cat([counts.view(ep.size, each), figures], 1)
    came = _received(sent, ep)
    received, beside = came[:, :each], came[:, each:]
    every = [] if etp.size == 1 else [_every(received.sum(0), etp)]
    of_sent, of_came, *of_parts = on_host(sent, came, *every)
    (rows_sent, more_sent), (rows_came, more_came) = (
        ([row[:each] for row in table], [row[each:] for row in table]) for table in (of_sent, of_came)
    )
    splits = Splits.over_ep(rows_sent, rows_came, received)
    parts = Splits.over_etp(of_parts[0], every[0], etp.rank) if every else None
    return splits, parts, Figures(received.sum(1), beside, more_sent, more_came)


def on_host(*tables: Tensor) -> list[list[list[int]]]:
    """Return the values of several tables of integers, for which the host waits once."""
    flat = iter(torch.cat([table.reshape(-1) for table in tables]).tolist())
    return [[[next(flat) for _ in range(table.shape[1])] for _ in range(table.shape[0])] for table in tables]


def _received(sent: Tensor, axis: AxisHandle) -> Tensor:
    """Return [ep, …]: what ranks send to this one, by their sender."""
    received = sent.clone()
    if axis.size > 1:
        note(axis, "all_to_all", "forward", sent)
        dist.all_to_all_single(received, sent.contiguous(), group=axis.group)
    return received


def _every(counts: Tensor, axis: AxisHandle) -> Tensor:
    """Return [etp, E / ep]: the rows that each rank of etp has."""
    every = counts.new_empty((axis.size, len(counts)))
    every[axis.rank] = counts
    if axis.size > 1:
        note(axis, "all_gather", "forward", every)
        dist.all_gather(list(every.unbind(0)), counts.contiguous(), group=axis.group)
    return every


def dispatch(rows: Tensor, splits: Splits, axis: AxisHandle) -> Tensor:
    """Return the rows of all ranks that go to this rank's experts, by expert; within one by sender."""
    if axis.size == 1:
        return rows
    came = moved(rows, splits, axis, _send, _return)
    return came.index_select(0, splits.order)


def give_back(rows: Tensor, splits: Splits, axis: AxisHandle) -> Tensor:
    """Return the results of the rows that this rank sent, in the order of sending."""
    if axis.size == 1:
        return rows
    return moved(rows.index_select(0, _inverse(splits.order)), splits, axis, _return, _send)


def spread_rows(rows: Tensor, splits: Splits, axis: AxisHandle) -> Tensor:
    """Return the rows of all etp ranks, by expert."""
    return moved(rows, splits, axis, _to_all, _sum_of_parts).index_select(0, splits.order)


def gather_in(rows: Tensor, splits: Splits, axis: AxisHandle) -> Tensor:
    """Return (P → V) this etp rank's rows, in the order in which it spread them, each the sum of the ranks' parts."""
    return moved(rows.index_select(0, _inverse(splits.order)), splits, axis, _sum_of_parts, _to_all)


def _by_expert(counts: Tensor, num_rows: int) -> Tensor:
    """The order that brings rows by expert which lie by sender, ``counts`` [senders, experts], ``num_rows`` in all."""
    return torch.sort(owners(counts.reshape(-1), num_rows) % counts.shape[1], stable=True).indices


def owners(counts: Tensor, num_rows: int) -> Tensor:
    """Return the group of each of ``num_rows`` rows that lie group by group, ``counts`` of each.

    The host knows the sum of counts, and does not wait for it, unlike a ``repeat_interleave`` without an output size.
    """
    rows = torch.arange(num_rows, device=counts.device)
    return torch.searchsorted(counts.cumsum(0), rows, right=True)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def moved(rows: Tensor, splits: Any, axis: AxisHandle, there: _Move, back: _Move) -> Tensor:
    """Move rows one way in the forward, and their gradients the other way in the backward."""
    return Way.apply(rows, lambda x: there(x, splits, axis, "forward"), lambda g: back(g, splits, axis, "backward"))


def _to_all(rows: Tensor, splits: Splits, axis: AxisHandle, phase: str) -> Tensor:
    """Gather uneven parts, which neither gloo nor NCCL does: every rank is sent the same."""
    same = rows.repeat(axis.size, *(1 for _ in rows.shape[1:]))
    return _send(same, splits, axis, phase)


def _sum_of_parts(rows: Tensor, splits: Splits, axis: AxisHandle, phase: str) -> Tensor:
    """Reduce-scatter uneven parts: each rank is sent its part by all, and adds them up."""
    came = _return(rows, splits, axis, phase)
    return came.view(axis.size, splits.sent[0], *rows.shape[1:]).sum(0)


def _send(rows: Tensor, splits: Splits, axis: AxisHandle, phase: str) -> Tensor:
    return exchanged(rows, splits.sent, splits.received, axis, phase)


def _return(rows: Tensor, splits: Splits, axis: AxisHandle, phase: str) -> Tensor:
    return exchanged(rows, splits.received, splits.sent, axis, phase, back=True)


def exchanged(
    rows: Tensor, sent: list[int], received: list[int], axis: AxisHandle, phase: str, *, back: bool = False
) -> Tensor:
    """Exchange rows all-to-all. On the way ``back`` it counts what comes: as many rows as this rank had sent before."""
    if axis.size == 1:
        return rows
    came = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(came, rows.contiguous(), received, sent, group=axis.group)
    note(axis, "all_to_all", phase, came if back else rows)
    return came
