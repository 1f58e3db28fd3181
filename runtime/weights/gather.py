"""Whole tensors on rank 0, from the shards that ranks hold by the plan; every rank walks its rows in one order.

Of equal copies, over dp, tp and the stages of a tied weight, the first one sends. Shards go from host memory to host
memory: no communicator of the device is made for each sender, and rank 0's device never holds a whole tensor. A rank
sends when rank 0 asks for it, so that no copies pile up while rank 0 writes, and none waits for less than that takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.placement.types import Placement
from planner.sharding.parameters import ParameterPlan
from runtime.distributed.groups import Groups
from runtime.distributed.patience import call, wait_for_rank_0


def collect(
    rows: Iterable[ParameterPlan], own: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], groups: Groups
) -> dict[str, Tensor]:
    """Full tensors on the CPU of rank 0, by name, ``{}`` elsewhere. ``own``: this rank's shards by name.

    ``dtypes``: what is sent of each row; rows without are left out. Every rank calls it with the same rows and dtypes.
    """
    found = {row.name: whole(row, own, dtypes[row.name], groups) for row in rows if row.name in dtypes}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def whole(row: ParameterPlan, own: Mapping[str, Tensor], dtype: torch.dtype, groups: Groups) -> Tensor | None:
    """The full tensor of one row on the CPU of rank 0, None elsewhere."""
    senders = _senders(row, groups)
    if groups.rank == 0:
        return assemble(_shards(senders, row, own, dtype, groups), row.placement, row.shape)
    if groups.rank in senders:
        wait_for_rank_0(groups)
        dist.send(own[row.name].detach().cpu().contiguous(), 0, group=groups.host)
    return None


def _shards(
    senders: Sequence[int], row: ParameterPlan, own: Mapping[str, Tensor], dtype: torch.dtype, groups: Groups
) -> list[Tensor]:
    """On rank 0, in the order of ``senders``: all are asked, then awaited."""
    others = [rank for rank in senders if rank != 0]
    parts = {rank: torch.empty(row.local_shape, dtype=dtype) for rank in others}
    works: list[Any] = [dist.irecv(parts[rank], rank, group=groups.host) for rank in others]
    call(groups, others)
    for work in works:
        work.wait()
    return [own[row.name].detach().cpu() if rank == 0 else parts[rank] for rank in senders]


def _senders(row: ParameterPlan, groups: Groups) -> list[int]:
    """In tp order."""
    mesh = groups.mesh
    tp_ranks = range(mesh.tp if row.dim is not None else 1)
    return [mesh.rank_of(tp=tp, cp=0, dp=0, pp=min(row.stages) % mesh.pp) for tp in tp_ranks]


def assemble(shards: Sequence[Tensor], placement: Placement, global_shape: Sequence[int]) -> Tensor:
    """The full tensor of all tp ranks' shards, without padding."""
    if not placement.is_sharded:
        return shards[0].clone()
    size = global_shape[placement.dim]
    padded = list(global_shape)
    padded[placement.dim] = size + placement.padding
    full = shards[0].new_empty(padded)
    for tp_rank, part in enumerate(shards):
        offset = 0
        for start, stop in placement.slices(len(shards), tp_rank):
            full.narrow(placement.dim, start, stop - start).copy_(part.narrow(placement.dim, offset, stop - start))
            offset += stop - start
    return full.narrow(placement.dim, 0, size).contiguous()


def from_rank_0(groups: Groups, value: Any) -> Any:
    """Rank 0's picklable ``value``, on every rank."""
    if groups.host is None:
        return value
    shared = [value]
    dist.broadcast_object_list(shared, src=0, group=groups.host)
    return shared[0]
