"""Bytes that a process holds on a device beside its tensors: the allocator's, the driver's, those of collectives.

    slack            at least ``device.slack`` of all tensors, those that stay included: gaps lie between them
    context          of the driver and its libraries, as the cluster file states it
    communicators    one for each process group of the rank, by the outermost link that it crosses: all ranks; each
                     axis, those of experts that have other ranks too, and dp-cp beside dp and cp; further axes over
                     which its buffers are exchanged; each neighbour in the pipeline, by direction

NCCL holds buffers for each channel and neighbour of a communicator, whatever is sent through it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil

from planner.cluster.cluster import Cluster
from planner.cluster.links import EXPERT_AXES, group, level_between
from planner.cost.memory import MemoryRow
from planner.mesh import OF_WEIGHTS, REPLICA, SHARD, Mesh
from planner.pipeline.links import links
from planner.sharding.buffers import Buffer
from planner.sharding.collectives import sums_of
from planner.sharding.homes import shared_over
from planner.spec.update_rules import MATRIX_RULES

_TIED = "embedding"


def device_bytes(mesh: Mesh, cluster: Cluster, pp_rank: int = 0, further: Collection[str] = ()) -> int:
    """Of one rank of ``pp_rank``. ``further``: the axes of the exchanges of its buffers."""
    own = _axes(mesh)
    reached = (_outermost(mesh, axis, cluster) for axis in (*own, *sorted({*further} - {*own, *EXPERT_AXES})))
    ends = (ranks for pp_ranks, ranks in _links(mesh) if pp_rank in pp_ranks)
    levels = [level for level in reached if level is not None] + [level_between(*pair, cluster) for pair in ends]
    return (cluster.device.context or 0) + sum(cluster.links[level].communicator or 0 for level in levels)


@lru_cache(maxsize=1 << 12)
def _axes(mesh: Mesh) -> tuple[str, ...]:
    """Each once: an axis of experts with the ranks of a dense one is that group."""
    dense = {"etp": "tp", "edp": mesh.data_axis}
    experts = EXPERT_AXES if mesh.has_expert_axes else {}
    ranks = {axis: mesh.expert.group_of(token, 0) for axis, token in experts.items()}
    apart = [axis for axis in ranks if axis not in dense or mesh.group_of(dense[axis], 0) != ranks[axis]]
    return ("world", "tp", "dp", *(("cp", "dp-cp") if mesh.cp > 1 else ()), *apart)


@lru_cache(maxsize=1 << 12)
def _links(mesh: Mesh) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
    """Both pp ranks of each link of a pipeline, and two of their ranks."""
    firsts = [mesh.rank_of(pp=rank) for rank in range(mesh.pp)]
    found = links(mesh.pp, mesh.vpp, mesh.fold)
    return tuple(((a, b), (firsts[a], firsts[b])) for a, b, _ in found)


def _outermost(mesh: Mesh, axis: str, cluster: Cluster) -> int | None:
    """The level of the outermost link that a group of the axis crosses; None for an axis of one rank."""
    name = "pp" if axis.startswith(_TIED) else axis.removesuffix(OF_WEIGHTS)
    return max((level for level, size in enumerate(group(mesh, name, cluster).sizes) if size > 1), default=None)


def exchange_axes(mesh: Mesh, over: str, tied: str | None, *, gathers: bool, matrices: str) -> set[str]:
    """Of one buffer. ``tied``: stages that share it; None: no other one does. ``matrices``: the axis of its updates."""
    found = {over, *([over + OF_WEIGHTS] if gathers else ()), *((SHARD, REPLICA) if mesh.replica > 1 else ())}
    return found | ({_TIED + tied} if tied is not None else set()) | ({matrices} if matrices else set())


def on_device(
    rows: Sequence[MemoryRow], mesh: Mesh, cluster: Cluster | None, buffers: Iterable[Buffer] = ()
) -> tuple[MemoryRow, ...]:
    """``rows`` with these bytes; as they are without a cluster. ``buffers``: of all pp ranks."""
    return tuple(rows) if cluster is None else with_axes(rows, mesh, cluster, _axes_of_buffers(buffers, mesh))


def with_axes(
    rows: Sequence[MemoryRow], mesh: Mesh, cluster: Cluster, further: Sequence[Collection[str]]
) -> tuple[MemoryRow, ...]:
    """The same by the axes over which the buffers of each pp rank are exchanged."""
    share = cluster.device.slack_share
    of_rank = [device_bytes(mesh, cluster, rank, axes) for rank, axes in enumerate(further)]
    return tuple(
        _with(row, of_rank[row.pp_rank], max(row.slack, ceil(share * (row.total - row.slack)))) for row in rows
    )


def _axes_of_buffers(buffers: Iterable[Buffer], mesh: Mesh) -> list[set[str]]:
    """By pp rank: the axes over which its buffers are summed, gathered or updated."""
    found: list[set[str]] = [set() for _ in range(mesh.pp)]
    for b in buffers:
        matrices = b.rule in MATRIX_RULES and shared_over(b.parameters[0], mesh, sharded=b.layout.num_ranks > 1)
        tied = str(b.tied_stages) if _TIED in sums_of(b, mesh) else None
        found[b.pp_rank] |= exchange_axes(mesh, b.reduced_over, tied, gathers=b.gathers, matrices=matrices or "")
    return found


def _with(row: MemoryRow, device: int, slack: int) -> MemoryRow:
    return replace(row, device=device, slack=slack, total=row.total - row.slack + slack + device)
