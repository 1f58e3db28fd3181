"""Full tensors on rank 0, from the shards that ranks hold by the plan; every rank walks its rows in one order.

Of equal copies, over dp or edp, tp or etp and the stages of a tied weight, the first one sends. Shards go from host
memory to host memory: no communicator of the device is made for each sender, and rank 0's device never holds a full
tensor. A rank sends when rank 0 asks for it, so that no copies pile up while rank 0 writes, and none waits for less
than that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planner.mesh import Mesh
from planner.sharding.parameters import ParameterPlan
from planner.sharding.parts import Part, part_of, pieces
from runtime.distributed.groups import Groups
from runtime.distributed.patience import call, wait_for_rank_0


class OwnParameters(Mapping[str, Tensor]):
    """This rank's part of each parameter, by name; ``opened`` brings one here when it is asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], opened: Callable[[str], None]) -> None:
        self._tensors, self._opened = tensors, opened

    def __getitem__(self, name: str) -> Tensor:
        self._opened(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def collect(
    rows: Iterable[ParameterPlan], own: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], groups: Groups
) -> dict[str, Tensor]:
    """Full tensors on the CPU of rank 0, by name, ``{}`` elsewhere. ``own``: this rank's shards by name.

    ``dtypes``: the dtype to send of each row; rows without one are left out. Every rank calls it with the same rows and
    dtypes.
    """
    found = {row.name: whole(row, own, dtypes[row.name], groups) for row in rows if row.name in dtypes}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def whole(row: ParameterPlan, own: Mapping[str, Tensor], dtype: torch.dtype, groups: Groups) -> Tensor | None:
    """The full tensor of one row on the CPU of rank 0, None elsewhere."""
    own.get(row.name)  # on every rank that has a part of it: it may be shared by several, which have to bring it here
    senders = senders_of(row, groups.mesh)
    if groups.rank == 0:
        return assemble(list(senders.values()), _shards([*senders], row, own, dtype, groups), row.shape)
    if groups.rank in senders:
        wait_for_rank_0(groups)
        dist.send(own[row.name].detach().cpu().contiguous(), 0, group=groups.host)
    return None


def _shards(
    senders: Sequence[int], row: ParameterPlan, own: Mapping[str, Tensor], dtype: torch.dtype, groups: Groups
) -> list[Tensor]:
    """On rank 0, in the order of ``senders``: all receives are posted, then awaited."""
    others = [rank for rank in senders if rank != 0]
    parts = {rank: torch.empty(row.local_shape, dtype=dtype) for rank in others}
    works: list[Any] = [dist.irecv(parts[rank], rank, group=groups.host) for rank in others]
    call(groups, others)
    for work in works:
        work.wait()
    return [own[row.name].detach().cpu() if rank == 0 else parts[rank] for rank in senders]


def senders_of(row: ParameterPlan, mesh: Mesh) -> dict[int, Part]:
    """The first rank that holds each part, with the part: all tp coordinates, or those of experts (etp and ep)."""
    pp, axis, expert = mesh.pp_rank_of(min(row.stages)), row.axis, row.expert
    cuts = range(mesh.size(axis) if row.dim is not None else 1)
    if expert is None:
        ranks = [mesh.rank_of(tp=tp, pp=pp) for tp in cuts]
    else:
        owners = range(mesh.ep) if expert.dim >= 0 else [expert.owner(mesh.ep)]
        ranks = [mesh.expert.rank_of({"tp": etp, "ep": ep, "dp": 0, "pp": pp}) for ep in owners for etp in cuts]
    return {rank: part_of(row, mesh, mesh.place(rank)) for rank in ranks}


def assemble(parts: Sequence[Part], shards: Sequence[Tensor], global_shape: Sequence[int]) -> Tensor:
    """The full tensor of all its parts, without padding."""
    placement = parts[0].placement
    full = shards[0].new_empty([n + placement.padding * (d == placement.dim) for d, n in enumerate(global_shape)])
    for part, held in zip(parts, shards, strict=True):
        for whole, local in pieces(part.ranges):
            _narrowed(full, whole).copy_(_narrowed(held, local))
    return full.narrow(placement.dim, 0, global_shape[placement.dim]).contiguous() if placement.padding else full


def _narrowed(tensor: Tensor, place: Mapping[int, tuple[int, int]]) -> Tensor:
    for dim, (start, stop) in place.items():
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def by_all_names(rows: Iterable[ParameterPlan], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In the model's order, tied parameters under each of their names; tensors without a row come last."""
    named = {}
    for row in rows:
        if row.name in tensors:
            named.update(dict.fromkeys((row.name, *row.aliases), tensors[row.name]))
    return {**named, **{name: tensor for name, tensor in tensors.items() if name not in named}}
