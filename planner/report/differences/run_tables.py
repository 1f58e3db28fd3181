"""How the tables of graphs, recompute, experts, memory, time and diagnostics are read beside each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

from planner.cost.memory import MemoryRow
from planner.cost.step_time import CostPlan
from planner.recompute.rows import RecomputeRow
from planner.regions.static_memory import GraphSlots
from planner.report.differences.change import BYTES, FLOPS, SECONDS, SHARE, Change, change
from planner.report.differences.matching import Column, Table, changes_of
from planner.report.sections import format_slots
from planner.tables.rows import Summary
from planner.tables.sizes import format_bytes
from planner.tables.tables import Tables

_TEXTS = ("pp_rank", "peak", "of_microbatch")  # fields of a memory row that are no category


def region_changes(before: Tables, after: Tables) -> list[Change]:
    """Parts of blocks that a graph captures or not, and why not."""
    captured = {True: "captured", False: "not captured"}
    table = Table(
        "Graph regions",
        name=lambda r: f"{r.block} {r.scope}",
        key=lambda r: (r.block, r.scope),
        tell=lambda r: f"{captured[r.captured]}{f': {r.reason}' if r.reason else ''}",
        apart=("inputs", "outputs"),
    )
    return changes_of(table, before.graph_regions, after.graph_regions)


def slot_changes(before: Tables, after: Tables) -> list[Change]:
    """The graphs of each chunk of each pp rank: how many, their replays and static bytes."""
    table = Table(
        "Graphs",
        name=lambda s: f"pp rank {s.pp_rank}" + ("" if s.chunk is None else f", chunk {s.chunk}"),
        key=lambda s: (s.pp_rank, s.chunk),
        tell=_graphs,
        columns=(Column("slots", ("slots",), lambda s: format_slots(s.slots) or "-"),),
    )
    return changes_of(table, before.graph_slots, after.graph_slots)


def _graphs(s: GraphSlots) -> str:
    return f"{s.num_graphs:,} graphs of {s.num_regions:,} regions, {s.num_replays:,} replays, {format_bytes(s.bytes)}"


def recompute_changes(before: Tables, after: Tables) -> list[Change]:
    """Bytes freed and recomputed in one microbatch: of all blocks together, then row by row."""
    table = Table(
        "Recompute",
        name=lambda r: r.where if r.where.startswith(r.block) else f"{r.block} {r.where}",
        key=lambda r: (r.block, r.where),
        tell=lambda r: f"{r.kind}: {r.ops}; {format_bytes(r.bytes)} freed",
        units={"moved": BYTES},
        block=lambda r: r.block,
        moves=("stage", "kind"),
    )
    totals = (("bytes", BYTES), ("flops", ""), ("moved", BYTES))
    sums = [(name, _sum(before.recompute, name), _sum(after.recompute, name), unit) for name, unit in totals]
    found = [
        change("Recompute", "all stages", _TOLD[name], old, new, unit) for name, old, new, unit in sums if old != new
    ]
    return found + changes_of(table, before.recompute, after.recompute)


def compiled_changes(before: Tables, after: Tables) -> list[Change]:
    """Pieces that are compiled, and calls that run op by op, with the reason."""
    table = Table(
        "Compiled",
        name=lambda r: r.where,
        key=lambda r: (r.block, r.where, r.ops),
        tell=lambda r: f"{r.ops}: {r.reason or f'function {r.function}'}",
        units={},
        block=lambda r: r.block,
        moves=("stage",),
    )
    return changes_of(table, before.compiled, after.compiled)


_TOLD = {"bytes": "freed", "flops": "FLOPs recomputed", "moved": "moved for recomputation"}


def _sum(rows: tuple[RecomputeRow, ...], name: str) -> int:
    return sum(getattr(row, name) for row in rows)


def expert_changes(before: Tables, after: Tables) -> list[Change]:
    """Expert layers: number of experts, dispatch, and ranks."""
    table = Table(
        "Experts",
        name=lambda e: e.block,
        key=lambda e: e.block,
        tell=lambda e: f"{e.num_experts} experts, {e.top_k or 'any number'} per token, {e.how}",
        block=lambda e: e.block,
    )
    return changes_of(table, before.experts, after.experts)


def length_changes(before: Tables, after: Tables) -> list[Change]:
    """Lengths that only one has, and figures of the others."""
    table = Table(
        "Lengths",
        name=lambda row: f"length {row.length}",
        key=lambda row: row.length,
        tell=lambda row: f"{row.sequences} sequences, {format_bytes(row.memory)} on the fullest rank",
        units={"memory": BYTES, "exchanged": BYTES},
    )
    return changes_of(table, before.lengths, after.lengths)


def memory_changes(before: Tables, after: Tables) -> list[Change]:
    """The fullest rank of each; then pp rank by pp rank, category by category."""
    fullest = [max(plan.memory, key=lambda row: row.total, default=None) for plan in (before, after)]
    old, new = (None if row is None else row.total for row in fullest)
    found = [change("Memory of one rank", "the fullest rank", "total", old, new, BYTES)] if old != new else []
    units = {f.name: BYTES for f in fields(MemoryRow) if f.name not in _TEXTS}
    table = Table(
        "Memory of one rank",
        name=lambda m: f"pp rank {m.pp_rank}",
        key=lambda m: m.pp_rank,
        tell=lambda m: f"{format_bytes(m.total)} in total",
        columns=(Column("per microbatch", ("of_microbatch",), lambda m: _bytes(m.of_microbatch)),),
        units=units,
    )
    return found + changes_of(table, before.memory, after.memory)


def _bytes(values: tuple[int, ...]) -> str:
    return " + ".join(map(format_bytes, values)) or "-"


def cost_changes(before: Tables, after: Tables) -> list[Change]:
    """Seconds of a step, part by part; a plan without a cluster has none."""
    names = [f.name for f in fields(CostPlan)]
    old, new = ({} if cost is None else {n: getattr(cost, n) for n in names} for cost in (before.cost, after.cost))
    return _values("Estimated time of one step", "one step", old, new, SECONDS, {"flops": FLOPS, "peak": FLOPS})


def summary_changes(before: Tables, after: Tables) -> list[Change]:
    """How much is sharded."""
    names = [f.name for f in fields(Summary)]
    old, new = ({n: getattr(plan.summary, n) for n in names} for plan in (before, after))
    counts = {"num_parameters": ""}
    return _values("Summary", "the model", old, new, SHARE, counts)


def _values(
    title: str, name: str, old: dict[str, Any], new: dict[str, Any], unit: str, units: dict[str, str] | None = None
) -> list[Change]:
    """Plain values by their keys; a key that one of them lacks has no value there."""
    keys = dict.fromkeys((*old, *new))
    return [
        change(title, name, key.replace("_", " "), old.get(key), new.get(key), (units or {}).get(key, unit))
        for key in keys
        if old.get(key) != new.get(key)
    ]


def diagnostic_changes(before: Tables, after: Tables) -> list[Change]:
    """Those that came and those that went."""
    table = Table(
        "Diagnostics",
        name=lambda d: d.where or "the plan",
        key=lambda d: (d.level, d.what, d.fix, d.where),
        tell=lambda d: f"{d.level}: {d.what}",
    )
    return changes_of(table, before.diagnostics, after.diagnostics)


def asked_changes(before: Tables, after: Tables) -> list[Change]:
    """The mesh, and every key of the specs that the mesh does not say already."""
    was, now = ({f.name: getattr(plan.mesh, f.name) for f in fields(plan.mesh)} for plan in (before, after))
    found = _values("Mesh", "mesh", was, now, "")
    said = [(f"mesh.{item.field}", item.before, item.after) for item in found]
    old, new = (_keys(plan.spec) for plan in (before, after))
    differ = [key for key in dict.fromkeys((*old, *new)) if old.get(key, _MISSING) != new.get(key, _MISSING)]
    asked = [change("Spec", key, "value", old.get(key), new.get(key)) for key in differ]
    return found + [item for item in asked if not _is_said(item, said)]


def _is_said(item: Change, said: list[tuple[str, Any, Any]]) -> bool:
    return (item.name, item.before, item.after) in said


_MISSING = object()


def _keys(values: Any, path: str = "") -> dict[str, Any]:
    """Every value of nested mappings by its dotted key; an empty mapping is a value."""
    if not isinstance(values, dict) or (path and not values):
        return {path: values}
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _keys(value, f"{path}.{name}" if path else str(name))
    return found


def traffic_changes(before: Tables, after: Tables) -> list[Change]:
    """Messages and bytes of each axis, phase and kind, of all places together, on the ranks of all stages."""
    old, new = _traffic(before), _traffic(after)
    names = dict.fromkeys(name for name, _ in (*new, *old))
    pairs = [(name, what, old[name, what], new[name, what]) for name in names for what in ("messages", "bytes")]
    return [
        change("Collectives", name, what, was, now, BYTES if what == "bytes" else "")
        for name, what, was, now in pairs
        if was != now
    ]


def _traffic(plan: Tables) -> Counter[tuple[str, str]]:
    found = Counter[tuple[str, str]]()
    for c in plan.collectives:
        name = f"{c.axis} {c.phase}{' again' if c.again else ''} {c.kind}, per {c.per}"
        found[name, "messages"] += c.count
        found[name, "bytes"] += c.count * c.bytes
    return found
