"""Bytes that a process holds on a device beside its tensors: the allocator's, the driver's, those of collectives.

    slack            at least ``device.slack`` of all tensors, those that stay included: gaps lie between them
    context          of the driver and its libraries, as the cluster file states it
    communicators    one for each axis with several ranks, by the outermost link that a group of it crosses

NCCL holds buffers for each channel and neighbour of a communicator, whatever is sent through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from planner.cluster.cluster import Cluster
from planner.cluster.links import group
from planner.cost.memory import MemoryRow
from planner.mesh import Mesh


def device_bytes(mesh: Mesh, cluster: Cluster) -> int:
    """Of one rank."""
    axes = [axis for axis in ("tp", "cp", "ep", "pp", mesh.data_axis) if mesh.size(axis) > 1]
    found = cluster.device.context or 0
    for axis in (*axes, *(["world"] if axes else [])):
        reached = [level for level, size in enumerate(group(mesh, axis, cluster).sizes) if size > 1]
        found += cluster.links[reached[-1]].communicator or 0
    return found


def on_device(rows: Sequence[MemoryRow], mesh: Mesh, cluster: Cluster | None) -> tuple[MemoryRow, ...]:
    """``rows`` with these bytes; as they are without a cluster."""
    if cluster is None:
        return tuple(rows)
    more, share = device_bytes(mesh, cluster), cluster.device.slack_share
    return tuple(_with(row, more, max(row.slack, ceil(share * (row.total - row.slack)))) for row in rows)


def _with(row: MemoryRow, device: int, slack: int) -> MemoryRow:
    return replace(row, device=device, slack=slack, total=row.total - row.slack + slack + device)
