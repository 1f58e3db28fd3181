"""Rank 0 works long, writing files, and the others wait as long as it takes: longer than for any other exchange.

    rank 0 requests the next value of a rank       the rank waits for this, without locks, then sends
    rank 0 is done                                 the others go on to agree with it in the group's own time

A rank notices a dead peer at once: the connection closes.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from runtime.distributed.groups import Groups

PATIENCE = timedelta(days=1)


def call(groups: Groups, ranks: Iterable[int]) -> None:
    """On rank 0: end one ``wait_for_rank_0`` of each of ``ranks``."""
    word = torch.zeros(1, dtype=torch.uint8)
    for work in [dist.isend(word, rank, group=groups.host) for rank in ranks]:
        assert work is not None
        work.wait()


def wait_for_rank_0(groups: Groups) -> None:
    """On another rank: until rank 0 calls."""
    work = dist.irecv(torch.empty(1, dtype=torch.uint8), 0, group=groups.host)
    assert work is not None
    work.wait(PATIENCE)


def until_rank_0_is_done(groups: Groups) -> None:
    """On every rank, before an exchange of all, after rank 0 may have been long."""
    if groups.host is None:
        return
    if groups.rank == 0:
        call(groups, range(1, groups.mesh.world_size))
    else:
        wait_for_rank_0(groups)
