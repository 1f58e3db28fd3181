"""Mesh → process groups: created after the rendezvous of all ranks, so that a mismatch is one error and not a hang.

Uses the default process group if it exists, and otherwise creates it (environment of torchrun, srun, mpirun or
``runtime.distributed.launch``); one rank alone needs neither launcher nor group.

Options of NCCL communicators by their traffic. Other backends have none.

links           few thread blocks: a receive that is posted ahead spins until its message comes
tp, cp, ep      a high-priority stream: they start before compute that is queued already
of weights      the same: gathers of weights in shards (zero 3), on a group beside that of the gradients' sums
dp, tied        the default priority: gradients are reduced behind compute that does not wait for them

Links as process groups: one of two ranks for each sender, receiver and direction of the pipeline.

NCCL has no tags and runs the messages of one communicator in one stream: on a shared one, two neighbours that both send
first would wait for each other. On a link of its own every message has one order (``planner.pipeline.links``).

NCCL builds a communicator when it is used first, and holds the host of a rank until all members have come. Inside a
step that is a trap: a rank that posts a receive ahead is held before the forward that its peer waits for. So before the
first step each rank walks one list of all communicators of the mesh, and uses those that it is a member of.

It ends: of the communicators that are not built yet take the first of the list. Each of its members has left behind all
those before it that it is in, so all of them come to this one.
"""

import os
import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from passes.errors import PlanError
from planner.mesh import OF_WEIGHTS, Mesh
from planner.pipeline.links import Link, links
from runtime.distributed.default_group import default_backends, faults_board, next_store, open_world
from runtime.distributed.devices import Launched, choose_device, known_rank, launched
from runtime.distributed.faults.activity import Activity
from runtime.distributed.faults.board import Signer
from runtime.distributed.faults.faults import Faults
from runtime.distributed.groups import Groups, Name
from runtime.distributed.meeting import Rendezvous, Seat
from runtime.distributed.this_host import stay_on_one_host

LINK_CTAS = 2  # thread blocks that a link may occupy, so that products beside it keep the other multiprocessors
_AWAITED = frozenset({"tp", "cp", "ep", "etp"})  # axes with results that the next kernel reads


def open_groups(
    mesh: Mesh,
    identity: dict[str, str],
    tied: Iterable[tuple[int, ...]],
    *,
    device: torch.device | str | None = None,
    timeout_seconds: float = 600.0,
    combined: Iterable[str] = (),
) -> Groups:
    """Every process group of ``mesh``; the same call on every rank.

    ``identity``: texts that must be equal on all ranks, by name. ``tied``: the stage sets of parameters on several
    stages. ``combined``: axes of several names that need a group, as ``tp-dp``.
    Raises PlanError on every rank when the launched world is not the mesh, identities differ, or the ranks'
    devices do not go together.
    """
    timeout = timedelta(seconds=timeout_seconds)
    place = launched(os.environ, (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None)
    check_world(mesh, place.world_size)
    rank = known_rank(place)
    activity = Activity(rank, mesh.shown_place(rank))
    if mesh.world_size == 1:
        return Groups(mesh, 0, _begin_on(_device(device, place)), timeout)
    stay_on_one_host()
    store = next_store(rank, mesh.world_size, timeout)
    faults = Faults(activity, faults_board(), mesh.world_size)
    seat = _seat(place, device, {**identity, "the default process group": str(default_backends())}, tied)
    try:
        signer = Signer.of(os.environ)
        verdict = Rendezvous(store, rank, mesh.world_size, timeout, signer, faults.board).meet(seat, mesh.pp)
        own = _begin_on(torch.device(seat.device))
        world = open_world(own.type, verdict.backend, store, rank, mesh.world_size, timeout)
    except BaseException as error:
        faults.fail(error)
        raise
    given = (world.owns_default, world.device, world.host, verdict.backend)
    groups = Groups(mesh, rank, own, timeout, *given, made=world.made, faults=faults)
    try:
        _fill(groups, verdict.tied, combined)
    except BaseException as error:
        groups.faults.publish(error)
        groups.abort()
        raise
    return groups


def _fill(groups: Groups, tied_sets: Iterable[tuple[int, ...]], combined: Iterable[str] = ()) -> None:
    """The groups of a part of the ranks, each used once if a first use would block."""
    on_nccl = groups.backend == "nccl"
    world, *others = communicators(groups.mesh, tied_sets, combined, has_links=on_nccl)
    make(groups, others)
    if on_nccl:
        use_in_turn(groups, [world, *others])


def _device(given: torch.device | str | None, place: Launched) -> torch.device:
    return choose_device(given, place, cuda_available=torch.cuda.is_available(), device_count=torch.cuda.device_count())


def _begin_on(device: torch.device) -> torch.device:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _seat(
    place: Launched, given: torch.device | str | None, identity: dict[str, str], tied: Iterable[tuple[int, ...]]
) -> Seat:
    """This rank's entry for the rendezvous; a missing device is reported there, for all ranks."""
    host, stages = socket.gethostname(), tuple(sorted(set(tied)))
    try:
        device = _device(given, place)
        if device.type not in ("cpu", "cuda"):
            raise PlanError(f"several ranks cannot run on {device}", where="device", fix='give "cuda" or "cpu"')
    except PlanError as error:
        return Seat(host, error=error.words, identity=identity, tied=stages)
    named = given is not None and torch.device(given).index is not None
    return Seat(host, str(device), _gpu(device, host), named, identity, stages)


def _gpu(device: torch.device, host: str) -> str:
    """A name that no other GPU has, whatever each rank is shown of the machine; empty for the CPU.

    NCCL refuses two ranks of one host and GPU; NCCL_HOSTID takes the place of the host there, and thus here.
    """
    if device.type != "cuda":
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    name = str(uuid) if uuid else f"{host} {os.environ.get('CUDA_VISIBLE_DEVICES', '')} {device.index}"
    return f"{os.environ.get('NCCL_HOSTID', '')} {name}".lstrip()


def check_world(mesh: Mesh, world_size: int) -> None:
    """Raise PlanError unless as many ranks were launched as the mesh has."""
    if world_size == mesh.world_size:
        return
    sizes = " · ".join(f"{axis} {getattr(mesh, axis)}" for axis in ("tp", "cp", "pp", "dp") if getattr(mesh, axis) > 1)
    started = f"{world_size} were launched" if world_size > 1 else "only this one is running"
    what = f"the plan is for {mesh.world_size} ranks ({sizes or 'one alone'}), but {started}"
    fix = f"launch {mesh.world_size} ranks (torchrun --nproc-per-node, or train --nproc), or change the mesh"
    raise PlanError(what, where="mesh", fix=fix)


class Communicator(NamedTuple):
    """``members``: of a link its sender and receiver."""

    name: Name
    members: tuple[int, ...]


def communicators(
    mesh: Mesh, tied_sets: Iterable[tuple[int, ...]], combined: Iterable[str] = (), *, has_links: bool = True
) -> list[Communicator]:
    """Every communicator of the mesh with several members, that of all ranks first: the same list on every rank.
    ``has_links``: in place of pp.

    With cp > 1, dp-cp has one of its own even if cp has the same ranks, so that attention's keys do not queue behind
    gradients.
    """
    axes = ["tp", *(("cp", "dp", "dp-cp") if mesh.cp > 1 else ("dp",)), *(() if has_links else ("pp",))]
    axes += ["etp", "ep", "edp"] if mesh.has_expert_axes else []
    lines, found = mesh.groups("pp"), [Communicator("world", tuple(range(mesh.world_size)))]
    found += [Communicator(axis, tuple(ranks)) for axis in (*axes, *combined) for ranks in mesh.groups_over(axis)]
    for stages in tied_sets:
        pp_ranks = sorted({mesh.pp_rank_of(stage) for stage in stages})
        found += [Communicator(stages, tuple(line[pp_rank] for pp_rank in pp_ranks)) for line in lines]
    for link in links(mesh.pp, mesh.vpp, mesh.fold) if has_links else ():
        found += [Communicator(link, (line[link.sender], line[link.receiver])) for line in lines]
    return [each for each in found if len(each.members) > 1]


def make(groups: Groups, ordered: Iterable[Communicator]) -> None:
    """The groups of this rank, for tensors of the device alone. All ranks make all, in one order.

    Of experts etp with the ranks of tp is that group, and so is edp with those of dp (with cp > 1: of dp-cp). Never
    ep: rows on their way to experts must not queue behind the sums of gradients.
    """
    dense: dict[Name, Name] = {"etp": "tp", "edp": groups.mesh.data_axis}
    made: dict[Communicator, Any] = {}
    for name, members in ordered:
        alike = Communicator(dense.get(name, name), members)
        if alike not in made:
            options = options_of(groups.backend, name)
            made[alike] = dist.new_group(
                list(members), timeout=groups.timeout, backend=groups.backend, pg_options=options
            )
            groups.made += [made[alike]] if groups.rank in members else []
        if groups.rank in members:
            groups.by_name[name] = made[alike]


def options_of(backend: str, name: Name) -> Any:
    """None if the backend has none, or the default serves. A group keeps the object, so each gets its own."""
    if backend != "nccl":
        return None
    if isinstance(name, Link):
        options = dist.ProcessGroupNCCL.Options()
        options.config.min_ctas = 1
        options.config.max_ctas = LINK_CTAS
        return options
    is_awaited = name in _AWAITED or str(name).endswith(OF_WEIGHTS)
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if is_awaited else None


def use_in_turn(groups: Groups, ordered: Iterable[Communicator]) -> None:
    """Exchange one element over every communicator of this rank, and wait for it. The same call on every rank."""
    for name, members in ordered:
        if groups.rank not in members:
            continue
        group, element = groups.over(name), torch.zeros(1, device=groups.device)
        if not isinstance(name, Link):
            dist.all_reduce(element, group=group)
        elif groups.rank == members[0]:
            dist.send(element, members[1], group=group)
        else:
            dist.recv(element, members[0], group=group)
