"""The devices by node, coloured by pipeline rank: one path for each colour.

A node is a box of devices, rank after rank; nodes follow in lines. The place of a device is arithmetic; the script of
the page repeats it to find the rank under the pointer, its coordinates and its groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import ceil, sqrt
from typing import Any

from planner.mesh import Mesh
from planner.ranks import RankGenerator
from planner.report.fold import ranges
from planner.report.page.palette import NUM_RANK_COLOURS
from planner.report.shapes import box

MOST_DRAWN = 1 << 15  # devices; more are counted and not drawn
WIDTH = 760  # pixels of a line of nodes
_CELLS = ((64, 44), (256, 26), (1024, 14), (4096, 7), (MOST_DRAWN, 4))  # up to so many devices, pixels of one
_TEXT = 26  # pixels of a device in which its rank can be read


@dataclass(frozen=True, slots=True)
class Geometry:
    """Pixels of a device; devices across a node and down it; nodes of a line; the gap between nodes."""

    cell: int
    across: int
    down: int
    nodes: int
    gap: int

    def place(self, rank: int, node: int) -> tuple[int, int]:
        """The left upper corner of a device; ``node``: devices of a node."""
        box, inside = divmod(rank, node)
        x = box % self.nodes * (self.across * self.cell + self.gap) + inside % self.across * self.cell
        y = box // self.nodes * (self.down * self.cell + self.gap) + inside // self.across * self.cell
        return x, y


@dataclass(frozen=True, slots=True)
class Devices:
    """``paths``: (fill, path) of the devices of the pipeline ranks of one colour. ``data``: the input of the script."""

    geometry: Geometry
    width: int
    height: int
    drawn: int
    paths: tuple[tuple[int, str], ...]
    labels: tuple[tuple[int, int, int], ...]
    legend: tuple[tuple[int, str], ...]
    groups: tuple[tuple[str, int, int, str], ...]
    notes: tuple[str, ...]
    data: dict[str, Any]


def devices(mesh: Mesh, node: int, known: bool) -> Devices:
    """``node``: devices of a node; ``known``: whether a cluster says so."""
    drawn = min(mesh.world_size, MOST_DRAWN)
    geometry = _geometry(drawn, min(node, mesh.world_size))
    node = min(node, mesh.world_size)
    boxes = ceil(drawn / node)
    width = min(boxes, geometry.nodes) * (geometry.across * geometry.cell + geometry.gap) - geometry.gap
    height = ceil(boxes / geometry.nodes) * (geometry.down * geometry.cell + geometry.gap) - geometry.gap
    axes = {"dense": _axes(mesh.dense), "expert": _axes(mesh.expert) if mesh.has_expert_axes else []}
    data = {
        "world": mesh.world_size, "drawn": drawn, "node": node, "colours": NUM_RANK_COLOURS,
        "cell": geometry.cell, "across": geometry.across, "down": geometry.down,
        "nodes": geometry.nodes, "gap": geometry.gap, "axes": axes,
    }  # fmt: skip
    colours = tuple((i, ranges(range(i, mesh.pp, NUM_RANK_COLOURS))) for i in range(min(mesh.pp, NUM_RANK_COLOURS)))
    return Devices(
        geometry, width, height, drawn, _paths(mesh, node, drawn, geometry), _labels(node, drawn, geometry),
        colours, tuple(_groups(mesh)), tuple(_notes(mesh, node, drawn, known)), data,
    )  # fmt: skip


def _geometry(drawn: int, node: int) -> Geometry:
    cell = next(size for most, size in _CELLS if drawn <= most)
    across = node if node <= 4 else max(n for n in range(1, min(node, 16) + 1) if node % n == 0 and n <= 2 * sqrt(node))
    gap = max(3, cell // 3)
    return Geometry(cell, across, ceil(node / across), max(1, (WIDTH + gap) // (across * cell + gap)), gap)


def _axes(ranks: RankGenerator) -> list[list[Any]]:
    """[axis, size, stride] of each axis that has more than one rank."""
    return [[axis, n, ranks.stride(axis)] for axis, n in zip(ranks.axes, ranks.sizes, strict=True) if n > 1]


def _paths(mesh: Mesh, node: int, drawn: int, geometry: Geometry) -> tuple[tuple[int, str], ...]:
    """Neighbours in a line of a node that have one colour are one box."""
    stride, cell = mesh.dense.stride("pp"), geometry.cell
    found: dict[int, list[str]] = {}
    for first in range(0, drawn, geometry.across):
        line = range(first, min(first + geometry.across, drawn, (first // node + 1) * node))
        for fill, run in groupby(line, lambda rank: rank // stride % mesh.pp % NUM_RANK_COLOURS):
            ranks = list(run)
            x, y = geometry.place(ranks[0], node)
            found.setdefault(fill, []).append(box(x, y, len(ranks) * cell, cell))
    return tuple((fill, "".join(boxes)) for fill, boxes in sorted(found.items()))


def _labels(node: int, drawn: int, geometry: Geometry) -> tuple[tuple[int, int, int], ...]:
    """(rank, x, y) of the numbers, if they can be read."""
    if geometry.cell < _TEXT:
        return ()
    half = geometry.cell // 2
    return tuple((rank, x + half, y + half + 4) for rank in range(drawn) for x, y in [geometry.place(rank, node)])


def _groups(mesh: Mesh) -> list[tuple[str, int, int, str]]:
    """(axis, ranks of a group, groups, the first of them) of all axes with more than one rank."""
    dense = [(axis, mesh.dense, axis) for axis in ("tp", "cp", "dp", "pp")]
    dense += [("dp-cp", mesh.dense, "dp-cp")] if mesh.cp > 1 and mesh.dp > 1 else []
    expert = [("etp", mesh.expert, "tp"), ("ep", mesh.expert, "ep"), ("edp", mesh.expert, "dp")]
    found = []
    for name, ranks, token in (*dense, *(expert if mesh.has_expert_axes else ())):
        size = mesh.size(name)
        if size > 1:
            found.append((name, size, mesh.world_size // size, shown(ranks.group_of(token, 0))))
    return found


def shown(ranks: Sequence[int]) -> str:
    """Ranks of a group: ``0, 8, 16, … 1016 (in steps of 8)``."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    steps = {b - a for a, b in pairwise(ranks)}
    every = f" (in steps of {next(iter(steps))})" if len(steps) == 1 and steps != {1} else ""
    return f"{', '.join(map(str, ranks[:3]))}, … {ranks[-1]}{every}"


def _notes(mesh: Mesh, node: int, drawn: int, known: bool) -> list[str]:
    notes = [f"nodes of {node} devices" + ("" if known else " (an assumption: the spec names no cluster)")]
    if drawn < mesh.world_size:
        notes.append(
            f"the picture shows the first {drawn:,} of {mesh.world_size:,} devices; look up any other rank by its "
            "number"
        )
    return notes
