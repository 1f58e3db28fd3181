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
from planner.sharding.boxes import Box
from planner.sharding.parameters import ParameterPlan
from planner.sharding.parts import Part, part_of, pieces
from runtime.distributed.groups import Groups
from runtime.distributed.patience import call, wait_for_rank_0

Runs = list[tuple[tuple[slice, ...], tuple[slice, ...]]]


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
    target = torch.empty(row.shape, dtype=dtype, device="cpu" if groups.rank == 0 else "meta")
    fetch(row, own, Box((0,) * len(row.shape), tuple(row.shape)), target, groups)
    return target if groups.rank == 0 else None


def fetch(row: ParameterPlan, own: Mapping[str, Tensor], box: Box, target: Tensor, groups: Groups) -> None:
    """Copy ``box`` of one row to ``target`` on rank 0. Every rank calls it for the same boxes, in one order."""
    own.get(row.name)  # on every rank that has a part of it: it may be shared by several, which have to bring it here
    runs = {rank: runs_in(part, row.shape, box) for rank, part in senders_of(row, groups.mesh).items()}
    if groups.rank == 0:
        _receive({rank: of_rank for rank, of_rank in runs.items() if of_rank}, row, own, target, groups)
    elif runs.get(groups.rank):
        held = own[row.name].detach()
        wait_for_rank_0(groups)
        sent = [held[local].reshape(-1).cpu() for local, _ in runs[groups.rank]]
        dist.send(torch.cat(sent) if len(sent) > 1 else sent[0].contiguous(), 0, group=groups.host)


def _receive(
    runs: Mapping[int, Runs], row: ParameterPlan, own: Mapping[str, Tensor], target: Tensor, groups: Groups
) -> None:
    """On rank 0: all receives are posted, then awaited."""
    others = [rank for rank in runs if rank != 0]
    sizes = {rank: [target[place].numel() for _, place in of_rank] for rank, of_rank in runs.items()}
    parts = {rank: torch.empty(sum(sizes[rank]), dtype=target.dtype) for rank in others}
    works: list[Any] = [dist.irecv(parts[rank], rank, group=groups.host) for rank in others]
    call(groups, others)
    for work in works:
        work.wait()
    for rank, of_rank in runs.items():
        received = parts[rank].split(sizes[rank]) if rank else [own[row.name].detach()[local] for local, _ in of_rank]
        for (_, place), values in zip(of_rank, received, strict=True):
            target[place].copy_(values.view_as(target[place]) if rank else values)


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


def runs_in(part: Part, shape: Sequence[int], box: Box) -> Runs:
    """The elements of ``box`` that a part of a tensor of ``shape`` has: slices of the part, and of the box."""
    found: Runs = []
    for whole, local in pieces(part.ranges):
        start, stop, shift = list(box.start), list(box.stop), [0] * len(shape)
        for dim, (first, last) in whole.items():
            start[dim], stop[dim] = max(start[dim], first), min(stop[dim], last, shape[dim])
            shift[dim] = local[dim][0] - first
        if all(a < b for a, b in zip(start, stop, strict=True)):
            held = tuple(slice(a + n, b + n) for a, b, n in zip(start, stop, shift, strict=True))
            found.append((held, Box(tuple(start), tuple(stop)).slices_in(box)))
    return found


def by_all_names(rows: Iterable[ParameterPlan], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In the model's order, tied parameters under each of their names; tensors without a row come last."""
    named = {}
    for row in rows:
        if row.name in tensors:
            named.update(dict.fromkeys((row.name, *row.aliases), tensors[row.name]))
    return {**named, **{name: tensor for name, tensor in tensors.items() if name not in named}}
