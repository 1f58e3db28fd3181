"""Mesh → process groups: which ranks this rank reduces, gathers and exchanges boundaries with.

Uses the default process group where one exists and makes one where not (environment of torchrun or
``distributed.launch``); one rank alone needs neither launcher nor group. Before anything else runs, the ranks meet once
and compare what must be the same everywhere, so that a difference becomes one error on every rank and not a hang.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store

from planner.errors import PlanError
from planner.mesh import Mesh
from runtime.distributed.first_use import use_each_once
from runtime.distributed.links import backend_of, make_links

_default_groups_made = 0
_rendezvous_store: Store | None = None


@dataclass(frozen=True, slots=True)
class RankMesh(Mesh):
    """The mesh as one rank sees it: sizes, and this rank's place on each axis (for a user's own DistributedSampler)."""

    rank: int = 0

    @classmethod
    def of(cls, mesh: Mesh, rank: int) -> RankMesh:
        return cls(**{f.name: getattr(mesh, f.name) for f in fields(Mesh)}, rank=rank)

    @property
    def tp_rank(self) -> int:
        return self.coordinate(self.rank)["tp"]

    @property
    def pp_rank(self) -> int:
        return self.coordinate(self.rank)["pp"]

    @property
    def dp_rank(self) -> int:
        return self.coordinate(self.rank)["dp"]

    @property
    def dp_size(self) -> int:
        return self.dp


@dataclass
class Groups:
    """The process groups of one rank; a group of one rank is None.

    Owns: the default group where ``owns_default``, and every group in ``made``. ``embedding`` maps the stages that hold
    a tied parameter to the group of this rank's tp and dp coordinate over them.
    """

    mesh: Mesh
    rank: int
    device: torch.device
    timeout: timedelta
    owns_default: bool = False
    world: ProcessGroup | None = None
    tp: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    embedding: dict[tuple[int, ...], ProcessGroup | None] = field(default_factory=dict)
    links: dict[tuple[int, int, str], ProcessGroup] = field(default_factory=dict)
    made: list[ProcessGroup] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coordinate = self.mesh.coordinate(self.rank)

    @property
    def tp_rank(self) -> int:
        return self.coordinate["tp"]

    @property
    def dp_rank(self) -> int:
        return self.coordinate["dp"]

    @property
    def pp_rank(self) -> int:
        return self.coordinate["pp"]

    def rank_of_stage(self, stage: int) -> int:
        """The global rank that runs ``stage`` at this rank's tp and dp coordinate: chunk c of pp rank r is c·pp + r."""
        return self.mesh.rank_of(**{**self.coordinate, "pp": stage % self.mesh.pp})

    def barrier(self) -> None:
        if self.world is not None:
            dist.barrier(group=self.world)

    def close(self) -> None:
        """Wait for all ranks and end the groups made here; the user's own default group stays."""
        if self.world is None:
            return
        self.barrier()
        self.destroy()

    def destroy(self) -> None:
        if self.owns_default:
            dist.destroy_process_group()
        else:
            for group in self.made:
                dist.destroy_process_group(group)
        self.world = self.tp = self.dp = self.pp = None
        self.embedding, self.links, self.made = {}, {}, []


def open_groups(
    mesh: Mesh,
    identity: dict[str, str],
    tied: Iterable[tuple[int, ...]],
    *,
    device: torch.device | None = None,
    timeout_seconds: float = 600.0,
) -> Groups:
    """Every process group of ``mesh``; the same call on every rank.

    ``identity`` is what must be equal on all ranks, by name. ``tied`` are the stage sets of parameters that stand on
    several stages. Raises PlanError on every rank when the launched world is not the mesh, or identities differ.
    """
    timeout = timedelta(seconds=timeout_seconds)
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != mesh.world_size:
        raise _wrong_world(mesh, world_size)
    device = device or default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size == 1:
        return Groups(mesh, 0, device, timeout)
    owns_default = not dist.is_initialized()
    if owns_default:
        _make_default_group(device, timeout)
    groups = Groups(mesh, dist.get_rank(), device, timeout, owns_default, dist.group.WORLD)
    try:
        tied_sets = _meet(groups, identity, tied)
    except PlanError:
        groups.close()
        raise
    on_nccl = backend_of(groups) == "nccl"
    _make_axis_groups(groups, ("tp", "dp") if on_nccl else ("tp", "dp", "pp"))  # there links take the place of pp
    _make_embedding_groups(groups, tied_sets)
    if on_nccl:
        make_links(groups)
        use_each_once(groups)
    return groups


def default_device() -> torch.device:
    """This rank's own GPU where the machine has one for each local rank, else the CPU."""
    local_rank, num_local = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.cuda.is_available() and num_local <= torch.cuda.device_count():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def default_store() -> Store | None:
    """The key-value store behind the default group; None for a rank alone."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def _wrong_world(mesh: Mesh, world_size: int) -> PlanError:
    sizes = " · ".join(f"{axis} {getattr(mesh, axis)}" for axis in ("tp", "cp", "pp", "dp") if getattr(mesh, axis) > 1)
    started = f"{world_size} were launched" if world_size > 1 else "only this one runs"
    return PlanError(
        f"the plan is for {mesh.world_size} ranks ({sizes or 'one alone'}), but {started}",
        where="mesh",
        fix=f"launch {mesh.world_size} ranks (torchrun --nproc-per-node, or train --nproc), or change the mesh",
    )


def _make_default_group(device: torch.device, timeout: timedelta) -> None:
    """A default group over a part of the store that no earlier group of this process has used.

    Keys of a group that was destroyed stay in the launcher's store; the next group must not read its dead addresses.
    """
    global _default_groups_made, _rendezvous_store
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if _rendezvous_store is None:
        _rendezvous_store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    store = PrefixStore(f"meshwright/{_default_groups_made}", _rendezvous_store)
    _default_groups_made += 1
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _meet(groups: Groups, identity: dict[str, str], tied: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Compare identities over all ranks; return the union of their tied stage sets, in one order."""
    seen: list[Any] = [None] * groups.mesh.world_size
    dist.all_gather_object(seen, (identity, sorted(set(tied))), group=groups.world)
    for name in identity:
        values = [others.get(name) for others, _ in seen]
        if len(set(values)) > 1:
            raise _differ(name, values)
    return sorted({stages for _, sets in seen for stages in sets})


def _differ(name: str, values: Sequence[str | None]) -> PlanError:
    """What most ranks have is taken as right; the others are named."""
    usual, _ = Counter(values).most_common(1)[0]
    odd = [rank for rank, value in enumerate(values) if value != usual]
    first = values[odd[0]]
    return PlanError(
        f"{name} differs between ranks: {_listed(odd)} of {len(values)} (rank {odd[0]} has {first}, most have {usual})",
        fix="start every rank with the same model, spec and versions",
    )


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    names = ", ".join(map(str, ranks[:most])) + (", …" if len(ranks) > most else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def _make_axis_groups(groups: Groups, axes: Iterable[str]) -> None:
    for axis in axes:
        if getattr(groups.mesh, axis) > 1:
            setattr(groups, axis, _make(groups, groups.mesh.groups(axis)))


def _make(groups: Groups, members: Iterable[Sequence[int]]) -> ProcessGroup | None:
    """Create a group for each list of ranks; return the one with this rank. All ranks create all, in one order."""
    own = None
    for ranks in members:
        group: Any = dist.new_group(list(ranks), timeout=groups.timeout)
        if groups.rank in ranks:
            own = group
            groups.made.append(group)
    return own


def _make_embedding_groups(groups: Groups, tied_sets: Iterable[tuple[int, ...]]) -> None:
    mesh = groups.mesh
    for stages in tied_sets:
        pp_ranks = sorted({stage % mesh.pp for stage in stages})
        if len(pp_ranks) == 1:
            groups.embedding[stages] = None
            continue
        members = [[line[pp_rank] for pp_rank in pp_ranks] for line in mesh.groups("pp")]
        groups.embedding[stages] = _make(groups, members)
