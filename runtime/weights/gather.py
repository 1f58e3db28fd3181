"""Whole tensors on rank 0, from the shards that ranks hold by the plan; every rank walks its rows in one order.

Of equal copies, over dp, tp and the stages of a tied weight, the first one sends.
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
    if groups.rank != 0:
        if groups.rank in senders:
            dist.send(own[row.name].detach().contiguous(), 0, group=groups.world)
        return None
    shards = [_from(rank, row, own, dtype, groups) for rank in senders]
    return assemble(shards, row.placement, row.shape)


def _from(rank: int, row: ParameterPlan, own: Mapping[str, Tensor], dtype: torch.dtype, groups: Groups) -> Tensor:
    if rank == 0:
        return own[row.name].detach().cpu()
    part = torch.empty(row.local_shape, dtype=dtype, device=groups.device)
    dist.recv(part, rank, group=groups.world)
    return part.cpu()


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
    if groups.world is None:
        return value
    shared = [value]
    dist.broadcast_object_list(shared, src=0, group=groups.world)
    return shared[0]
