"""The first use of every communicator, before the first step, in one order that all ranks share.

NCCL builds a communicator when it is used first, and holds the host of a rank until all members have come. Inside a
step that is a trap: a rank that posts a receive ahead is held before the forward that its peer waits for. So here each
rank walks one list of all communicators of the mesh, and uses those that it is a member of.

It ends: of the communicators that are not built yet take the first of the list. Each of its members has left behind all
those before it that it is in, so all of them come to this one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from planner.mesh import Mesh
from planner.pipeline.links import links
from runtime.distributed.groups import Groups, dense_axes, expert_axes

Name = str | tuple[int, ...] | tuple[int, int, str]


class Communicator(NamedTuple):
    """``name``: "world", an axis, the stages of a tied parameter, or a link with its sender and receiver."""

    name: Name
    members: tuple[int, ...]


def communicators(mesh: Mesh, tied_sets: Iterable[tuple[int, ...]], combined: Iterable[str] = ()) -> list[Communicator]:
    """Every communicator of the mesh, in the one order of their first use: the same list on every rank."""
    lines = mesh.groups("pp")
    found = [Communicator("world", tuple(range(mesh.world_size)))]
    found += [Communicator(axis, tuple(ranks)) for axis in dense_axes(mesh) for ranks in mesh.groups(axis)]
    found += [Communicator(axis, tuple(ranks)) for axis, groups in expert_axes(mesh).items() for ranks in groups]
    found += [Communicator(axis, tuple(ranks)) for axis in combined for ranks in mesh.groups_over(axis)]
    for stages in tied_sets:
        pp_ranks = sorted({mesh.pp_rank_of(stage) for stage in stages})
        found += [Communicator(stages, tuple(line[pp_rank] for pp_rank in pp_ranks)) for line in lines]
    for link in links(mesh.pp, mesh.vpp, mesh.fold):
        found += [Communicator(link, (line[link.sender], line[link.receiver])) for line in lines]
    return found


def use_each_once(groups: Groups) -> None:
    """Exchange one element over every communicator of this rank, and wait for it. The same call on every rank."""
    use_in_turn(groups, communicators(groups.mesh, groups.embedding, groups.combined))


def use_in_turn(groups: Groups, ordered: Iterable[Communicator]) -> None:
    """The same, in a given order."""
    axes = ("world", *dense_axes(groups.mesh), "etp", "ep", "edp")
    own: dict[Name, Any] = {axis: groups.over(axis) for axis in axes}
    own |= {**groups.combined, **groups.embedding, **groups.links}
    for name, members in ordered:
        group = own.get(name)
        if group is None or groups.rank not in members:
            continue  # no member's group is there: an axis of size 1, or links in place of pp
        element = torch.zeros(1, device=groups.device)
        if name not in groups.links:
            dist.all_reduce(element, group=group)
        elif groups.rank == members[0]:
            dist.send(element, members[1], group=group)
        else:
            dist.recv(element, members[0], group=group)
