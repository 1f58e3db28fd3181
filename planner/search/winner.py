"""The answer of a search: as text or JSON with the layouts that lose, and as a spec of the chosen one, with all
that was decided written out, so that a plan of it searches nothing.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from planner.cost.layout import PARTS
from planner.pipeline.kinds import default_kind
from planner.ranks import DEFAULT_ORDER
from planner.report.section import Section
from planner.search.best_first import Candidate, gigabytes, percent, seconds_text, why_slower
from planner.search.search import Result
from planner.search.space import BOUNDS, Point
from planner.spec.fields import AUTO
from planner.spec.lines import read_yaml
from planner.spec.sections import MeshSpec
from planner.spec.spec import Spec


def spec_to_capture(spec: Spec, example_inputs: Mapping[str, Any] | None) -> Spec:
    """Return ``spec`` of one rank, with a number of sequences: its own, that of the inputs, or two.

    Two, because a batch of one cannot be distinguished from a dim of size one.
    """
    micro = spec.batch.micro
    if micro == AUTO:
        rows = {int(value.shape[0]) for value in (example_inputs or {}).values() if getattr(value, "ndim", 0)}
        micro = rows.pop() if len(rows) == 1 else min(2, spec.batch.global_size)
    batch = spec.batch.model_copy(update={"micro": micro})
    return spec.model_copy(update={"mesh": MeshSpec(), "batch": batch})


def chosen(result: Result, candidate: Candidate) -> str:
    """Return the chosen layout, the number of layouts, and the second best."""
    words = (
        f"chosen of {result.num_considered:,} layouts of {result.devices} devices of {result.cluster.name}: "
        f"{candidate.point}, about {seconds_text(candidate.seconds)} per step"
    )
    second = next((other for other in result.best if other is not candidate and other.order > candidate.order), None)
    if second is None:
        return words
    return f"{words}; second: {second.point}, {why_slower(second, candidate, result.cluster)}"


def fits_not(candidate: Candidate, most: int, memory_bytes: float) -> str:
    """Return a layout that fits by the estimate of the search, but not by its plan."""
    return f"skipped {candidate.point}: its plan needs {gigabytes(most)} of {gigabytes(memory_bytes)}"


def planned_spec(spec: Spec, point: Point) -> Spec:
    """Return ``spec`` with the sizes of ``point`` in place of auto; errors still name the lines of its file."""
    return Spec.load(with_layout(spec.to_dict(), point, written=True)).located(spec._locations)


def with_layout(values: Mapping[str, Any], point: Point, *, written: bool = False) -> dict[str, Any]:
    """Return the values of a spec with the layout. ``written``: also keys that have their default."""
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
    """Return YAML: the file at ``path`` with the layout in place of keys left to the search; comments are lost.

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


_SHARES = {
    "compute": ("compute", "recompute"),
    "tp": ("tp_comm",),
    "cp, ep": ("cp_comm", "ep_comm"),
    "pp": ("pp_comm",),
    "bubble": ("pp_bubble",),
    "dp, update": ("dp_comm", "optimizer"),
}


def result_sections(result: Result) -> list[Section]:
    return [_best(result), *_losers(result), *_ruled_out(result), _spent(result)]


def _best(result: Result) -> Section:
    tokens = _tokens(result)
    columns = ("", "layout", "a step", "between", "tokens/s" if tokens else "sequences/s", "memory", *_SHARES)
    rows = []
    for number, candidate in enumerate(result.best, start=1):
        rate = (tokens or result.spec.batch.global_size) / candidate.seconds if candidate.seconds else 0.0
        rows.append(
            (str(number), str(candidate.point), seconds_text(candidate.seconds),
             " and ".join(map(seconds_text, candidate.estimate.cost.range)), f"{rate:,.0f}",
             gigabytes(candidate.fullest.total), *_shares(candidate))
        )  # fmt: skip
    title = f"The fastest layouts of {result.devices} devices of {result.cluster.name}"
    note = (
        f"estimated; memory of the fullest rank, out of {gigabytes(result.memory_bytes)}; shares of a step; "
        f"batches of {result.spec.batch.global_size} sequences"
    )
    right = frozenset(("a step", "between", "tokens/s", "sequences/s", "memory", *_SHARES))
    return Section(title, columns, tuple(rows), note=note, right=right)


def _shares(candidate: Candidate) -> list[str]:
    cost = candidate.estimate.cost
    whole = candidate.seconds or 1.0
    return [percent(sum(getattr(cost, part) for part in parts) / whole) for parts in _SHARES.values()]


def _losers(result: Result) -> list[Section]:
    of_point = {loser.candidate.point: loser.choice for loser in result.losers}
    best = {other.point for other in result.best}
    rows = [
        (": ".join(filter(None, (str(number), of_point.get(other.point)))), str(other.point),
         why_slower(other, result.winner, result.cluster))
        for number, other in enumerate(result.best[1:], start=2)
    ]  # fmt: skip
    rows += [(r.choice, str(r.candidate.point), r.why) for r in result.losers if r.candidate.point not in best]
    title = "Why other layouts lose: the rest of the fastest, and a fast layout for each other choice"
    return [Section(title, ("choice", "layout", "reason"), tuple(rows))] if rows else []


def _ruled_out(result: Result) -> list[Section]:
    refused: dict[str, list[str]] = {}
    for cut, what in result.refused:
        refused.setdefault(what, []).append(str(cut))
    rows = [(cuts[0] if len(cuts) == 1 else f"{len(cuts)} cuts", what) for what, cuts in refused.items()]
    rows += [(f"{count:,}", reason) for reason, count in result.pruned.items()]
    rows += [("not searched", bound) for bound in BOUNDS]
    title = f"Ruled out of {result.num_considered:,} layouts; {result.num_estimated:,} were estimated"
    return [Section(title, ("layouts", "reason"), tuple(rows))]


def _spent(result: Result) -> Section:
    total = sum(result.seconds.values())
    parts = ", ".join(f"{what} {spent:.2f} s" for what, spent in result.seconds.items() if spent >= 0.005)
    return Section(f"Searched in {total:.2f} s", (), (), note=parts)


def _tokens(result: Result) -> int:
    """Return tokens of a step: of the longest sequence of ids; 0 without ids."""
    lengths = [i.sizes[0] for i in result.spec.inputs.values() if len(i.shape) == 1 and i.dtype.startswith("int")]
    return result.spec.batch.global_size * max(lengths, default=0)


def result_to_dict(result: Result) -> dict[str, Any]:
    """Return the form of ``--format json``; docs/search.md describes it."""
    return {
        "devices": result.devices,
        "cluster": result.cluster.name,
        "memory_bytes": int(result.memory_bytes),
        "considered": result.num_considered,
        "estimated": result.num_estimated,
        "best": [_candidate(candidate) for candidate in result.best],
        "losers": [
            {"choice": loser.choice, "fits": loser.fits, "why": loser.why, **_candidate(loser.candidate)}
            for loser in result.losers
        ],
        "refused": [{"cut": str(cut), "why": what} for cut, what in result.refused],
        "pruned": result.pruned,
        "bounds": list(BOUNDS),
        "seconds": result.seconds,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    cost, layout = candidate.estimate.cost, candidate.point.layout
    choices: Mapping[str, Any] = {**candidate.point.choices, "etp": layout.mesh.etp}
    return {
        "layout": {**{name.replace(" ", "_"): value for name, value in choices.items()}, "stages": list(layout.sizes)},
        "step_seconds": candidate.seconds,
        "step_seconds_range": list(cost.range),
        "memory_bytes": candidate.fullest.total,
        "cost": {part: getattr(cost, part) for part in PARTS},
    }
