"""One clock for ranks of several hosts: processes of a host share one, hosts ask rank 0 for the time.

    rank r: t₀ → rank 0: t → rank r: t₁        offset = t − (t₀ + t₁)/2, wrong by at most (t₁ − t₀)/2

Of several rounds the quickest counts (Cristian 1989, "Probabilistic clock synchronization").
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from runtime.distributed.exchange_json import all_gather_json
from runtime.distributed.faults.processes import host_key
from runtime.distributed.groups import Groups

ROUNDS = 20


class Offset(NamedTuple):
    """``seconds`` to add to this rank's clock to have rank 0's; wrong by at most ``error``."""

    seconds: float
    error: float


def offset_to_rank_0(groups: Groups) -> Offset:
    """The same call on every rank."""
    if groups.host is None:
        return Offset(0.0, 0.0)
    hosts = all_gather_json(groups, host_key())
    asking = [hosts.index(key) for key in dict.fromkeys(hosts) if key != hosts[0]]
    own = Offset(0.0, 0.0)
    for rank in asking:
        if groups.rank == 0:
            _answer(groups, rank)
        elif groups.rank == rank:
            own = _ask(groups)
    found = all_gather_json(groups, own, lambda seconds: Offset(*seconds))
    return found[hosts.index(hosts[groups.rank])]


def _answer(groups: Groups, rank: int) -> None:
    word = torch.zeros(1, dtype=torch.float64)
    for _ in range(ROUNDS):
        dist.recv(word, rank, group=groups.host)
        word.fill_(time.perf_counter())
        dist.send(word, rank, group=groups.host)


def _ask(groups: Groups) -> Offset:
    word, found = torch.zeros(1, dtype=torch.float64), list[Offset]()
    for _ in range(ROUNDS):
        before = time.perf_counter()
        dist.send(word, 0, group=groups.host)
        dist.recv(word, 0, group=groups.host)
        after = time.perf_counter()
        found.append(Offset(word.item() - (before + after) / 2, (after - before) / 2))
    return min(found, key=lambda offset: offset.error)
