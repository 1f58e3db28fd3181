"""The spec of one layout: all that the search decided written out, so that a plan of it searches nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from planner.cluster.cluster import Cluster
from planner.pipeline.schedule import default_kind
from planner.ranks import DEFAULT_ORDER
from planner.search.best_first import Candidate
from planner.search.choice import Point
from planner.search.losers import gigabytes, seconds_text, why_slower
from planner.search.refusals import check_devices, check_pins
from planner.search.search import Result
from planner.spec.fields import AUTO
from planner.spec.lines import read_yaml
from planner.spec.sections import MeshSpec
from planner.spec.spec import Spec


def spec_to_capture(spec: Spec, example_inputs: Mapping[str, Any] | None) -> Spec:
    """``spec`` of one rank, with a microbatch of a number: its own, that of the inputs, or two sequences.

    Two, because a batch of one cannot be distinguished from a dim of size one.
    """
    micro = spec.batch.micro
    if micro == AUTO:
        rows = {int(value.shape[0]) for value in (example_inputs or {}).values() if getattr(value, "ndim", 0)}
        micro = rows.pop() if len(rows) == 1 else min(2, spec.batch.global_size)
    batch = spec.batch.model_copy(update={"micro": micro})
    return spec.model_copy(update={"mesh": MeshSpec(), "batch": batch})


def check_before_capture(spec: Spec, cluster: Cluster) -> None:
    """Refuse errors that need no model before it is captured."""
    check_pins(spec, check_devices(spec, cluster))


def chosen(result: Result, candidate: Candidate) -> str:
    """The chosen layout, the number of layouts, and the second best."""
    words = (
        f"chosen of {result.num_considered:,} layouts of {result.devices} devices of {result.cluster.name}: "
        f"{candidate.point}, about {seconds_text(candidate.seconds)} per step"
    )
    second = next((other for other in result.best if other is not candidate and other.order > candidate.order), None)
    if second is None:
        return words
    return f"{words}; second: {second.point}, {why_slower(second, candidate, result.cluster)}"


def fits_not(candidate: Candidate, most: int, memory_bytes: float) -> str:
    """A layout that fits by the estimate of the search, but not by its plan."""
    return f"skipped {candidate.point}: its plan needs {gigabytes(most)} of {gigabytes(memory_bytes)}"


def planned_spec(spec: Spec, point: Point) -> Spec:
    """``spec`` with the sizes of ``point`` in place of auto; errors still name the lines of its file."""
    found = Spec.load(with_layout(spec.to_dict(), point, written=True))
    found._locations = spec._locations
    return found


def with_layout(values: Mapping[str, Any], point: Point, *, written: bool = False) -> dict[str, Any]:
    """The values of a spec with the layout. ``written``: also keys that have their default."""
    layout, found = point.layout, dict(values)
    found["mesh"] = _mesh(point)
    found["batch"] = {**found["batch"], "micro": layout.micro}
    _set(found, ("recompute",), layout.recompute, "none", written)
    _set(found, ("tensor_parallel", "sequence_parallel"), layout.sequence_parallel, False, written)
    _set(found, ("pipeline", "schedule"), layout.schedule, default_kind(1), written)
    _set(found, ("optimizer", "zero"), layout.zero, 1, written)
    return found


def _mesh(point: Point) -> dict[str, Any]:
    mesh = point.layout.mesh
    sizes = {"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp}
    sizes |= {axis: getattr(mesh, axis) for axis in ("vpp", "cp", "ep") if getattr(mesh, axis) > 1}
    sizes |= {"etp": mesh.etp} if mesh.etp != mesh.tp else {}
    return sizes | ({"order": mesh.order} if mesh.order != DEFAULT_ORDER else {})


def _set(values: dict[str, Any], path: tuple[str, ...], value: Any, default: Any, written: bool) -> None:
    *parents, name = path
    section = values
    for parent in parents:
        if parent not in section and value == default and not written:
            return
        section[parent] = dict(section.get(parent) or {})
        section = section[parent]
    if name in section or value != default or written:
        section[name] = value


def winner_text(path: Path, spec: Spec, point: Point, head: str) -> str:
    """YAML: the file at ``path`` with the layout in place of the keys that it left to the search; comments are lost.

    ``spec``: the content of the file, with the options of the command line. ``head``: lines of a comment above it.
    """
    value, _ = read_yaml(path)
    values = with_layout(value, point)
    if spec.cluster is not None:
        values["cluster"] = os.path.abspath(spec.cluster) if os.path.isfile(spec.cluster) else spec.cluster
    if "devices" in values:
        values["devices"] = point.layout.mesh.world_size
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    return comment + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
