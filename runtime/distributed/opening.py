"""Creates the process groups of a mesh, after the rendezvous of all ranks: a mismatch is one error and not a hang.

Uses the default process group if it exists, and otherwise creates it (environment of torchrun, srun, mpirun or
``runtime.distributed.launch``); a single rank needs neither launcher nor group.

NCCL communicators have options by their traffic; other backends have none:

links           few thread blocks: a receive that is posted ahead spins until its message comes
tp, cp, ep      a high-priority stream: they start before compute that is already queued
of weights      the same: all-gathers of sharded weights (zero 3), in another group than the reduction of gradients
dp, tied        the default priority: gradients are reduced behind compute that does not depend on them

A link is a process group of two ranks, one for each sender, receiver and direction of the pipeline. NCCL has no tags
and runs the messages of one communicator in one stream: on a shared one, two neighbours that both send first would wait
for each other. On its own link, each message has one order (``planner.pipeline.links``).

NCCL builds a communicator at its first use, and blocks the host of a rank until all members have come. Inside a step
this can deadlock: a rank that posts a receive ahead is blocked before the forward that its peer waits for. Before the
first step, each rank therefore walks one list of all communicators of the mesh, and uses those that it is a member of.

This terminates: consider the first communicator of the list that is not built. Its members have passed all earlier
communicators that they are in, so all of them reach this one.
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

LINK_CTAS = 2  # most thread blocks of a link: concurrent products keep the other multiprocessors
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
    """Return the process groups of ``mesh``. All ranks must call it.

    ``identity``: texts that must be equal on all ranks, by name. ``tied``: the stage sets of parameters on several
    stages. ``combined``: combined axes that need a group, as ``tp-dp``.
    Raises PlanError on every rank if the launched world does not match the mesh, or identities or devices of the ranks
    do not fit together.
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
    of_all = (world.owns_default, world.device, world.host, verdict.backend)
    groups = Groups(mesh, rank, own, timeout, *of_all, made=world.made, faults=faults)
    try:
        _fill(groups, verdict.tied, combined)
    except BaseException as error:
        groups.faults.publish(error)
        groups.abort()
        raise
    return groups


def _fill(groups: Groups, tied_sets: Iterable[tuple[int, ...]], combined: Iterable[str] = ()) -> None:
    """Create the groups of some of the ranks, and use each once if its first use would block."""
    on_nccl = groups.backend == "nccl"
    world, *others = communicators(groups.mesh, tied_sets, combined, has_links=on_nccl)
    make(groups, others)
    if on_nccl:
        use_in_turn(groups, [world, *others])


def _device(requested: torch.device | str | None, place: Launched) -> torch.device:
    num_gpus = torch.cuda.device_count()
    return choose_device(requested, place, cuda_available=torch.cuda.is_available(), device_count=num_gpus)


def _begin_on(device: torch.device) -> torch.device:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _seat(
    place: Launched, requested: torch.device | str | None, identity: dict[str, str], tied: Iterable[tuple[int, ...]]
) -> Seat:
    """Return this rank's entry for the rendezvous, where a missing device is reported on all ranks."""
    host, stages = socket.gethostname(), tuple(sorted(set(tied)))
    try:
        device = _device(requested, place)
        if device.type not in ("cpu", "cuda"):
            raise PlanError(f"several ranks cannot run on {device}", where="device", fix='give "cuda" or "cpu"')
    except PlanError as error:
        return Seat(host, error=error.words, identity=identity, tied=stages)
    named = requested is not None and torch.device(requested).index is not None
    return Seat(host, str(device), _gpu(device, host), named, identity, stages)


def _gpu(device: torch.device, host: str) -> str:
    """Return a unique name of a GPU, which does not depend on the GPUs that a rank sees; "" for the CPU.

    NCCL refuses two ranks on one GPU of one host; NCCL_HOSTID replaces the host there, and thus here.
    """
    if device.type != "cuda":
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    name = str(uuid) if uuid else f"{host} {os.environ.get('CUDA_VISIBLE_DEVICES', '')} {device.index}"
    return f"{os.environ.get('NCCL_HOSTID', '')} {name}".lstrip()


def check_world(mesh: Mesh, world_size: int) -> None:
    """Raise PlanError unless the number of launched ranks is that of the mesh."""
    if world_size == mesh.world_size:
        return
    sizes = " · ".join(f"{axis} {getattr(mesh, axis)}" for axis in ("tp", "cp", "pp", "dp") if getattr(mesh, axis) > 1)
    started = f"{world_size} were launched" if world_size > 1 else "only this one is running"
    what = f"the plan is for {mesh.world_size} ranks ({sizes or 'one alone'}), but {started}"
    fix = f"launch {mesh.world_size} ranks (torchrun --nproc-per-node, or train --nproc), or change the mesh"
    raise PlanError(what, where="mesh", fix=fix)


class Communicator(NamedTuple):
    """A communicator. ``members``: its ranks; for a link, sender and receiver."""

    name: Name
    members: tuple[int, ...]


def communicators(
    mesh: Mesh, tied_sets: Iterable[tuple[int, ...]], combined: Iterable[str] = (), *, has_links: bool = True
) -> list[Communicator]:
    """Return all communicators of the mesh with several members, that of all ranks first: the same list on every rank.

    ``has_links``: links in place of pp. With cp > 1, dp-cp has its own communicator even if cp has the same ranks: the
    keys of attention must not queue behind gradients.
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
    """Create the groups of this rank, for tensors on the device. All ranks must create all groups, in one order.

    etp shares the group of tp if it has the same ranks, and edp that of dp (with cp > 1: of dp-cp). ep never shares:
    the dispatch of rows to experts must not queue behind the reduction of gradients.
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
    """Return new options of a group, which keeps the object; None for the default, or a backend without options."""
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
    """Exchange one element over each communicator of this rank, and wait for it. All ranks must call it."""
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
