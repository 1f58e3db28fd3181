"""How the tables of parameters, collectives, stages, schedule and optimizer are read beside each other."""

from __future__ import annotations

from passes.program.stages import BoundaryPlan
from passes.types.collectives import CollectivePlan
from planner.pipeline.schedule import SchedulePlan
from planner.report.differences.change import SHARE, Change, change
from planner.report.differences.matching import Column, Table, changes_of
from planner.report.fold import fold, ranges
from planner.report.sections import cut_of, format_order, format_shape
from planner.sharding.buffers import BufferPlan, OptimizerPlan
from planner.sharding.parameters import ParameterPlan
from planner.tables.rows import StagePlan
from planner.tables.sizes import format_bytes
from planner.tables.tables import Tables

CUT = ("style", "dim", "segments", "whole_segments", "padding", "expert_dim", "expert_number", "num_experts")


def parameter_changes(before: Tables, after: Tables) -> list[Change]:
    """Cuts: style, dim and segments together; the local shape, the stages, the reason, and each other field."""
    block_of = _Blocks(before, after)
    columns = (
        Column("cut", CUT, lambda p: p.style if p.dim is None and p.expert_dim < 0 else f"{p.style}, {cut_of(p)}"),
        Column("local shape", ("local_shape",), lambda p: format_shape(p.local_shape)),
        Column("shape", ("shape",), lambda p: format_shape(p.shape)),
        Column("stages", ("stages",), lambda p: ranges(p.stages)),
    )
    table = Table(
        "Parameters",
        name=lambda p: p.name,
        key=lambda p: p.name,
        tell=_parameter,
        columns=columns,
        block=lambda p: block_of(p.name),
        moves=("stages",),
    )
    return changes_of(table, before.parameters, after.parameters)


def _parameter(p: ParameterPlan) -> str:
    return f"{p.style}, {format_shape(p.shape)} {p.dtype}, {format_shape(p.local_shape)} on a rank"


def collective_changes(before: Tables, after: Tables) -> list[Change]:
    """Each place of a collective: a message more or less, or its bytes, number and stage."""
    table = Table(
        "Places of collectives",
        name=lambda c: f"{_module(c.where)} {c.kind} over {c.axis}, {_phase(c)}",
        key=lambda c: (_module(c.where), c.kind, c.axis, c.phase, c.again, c.per),
        tell=lambda c: f"{c.count} of {format_bytes(c.bytes)} per {c.per}",
        block=lambda c: c.block,
        moves=("stage",),
    )
    return changes_of(table, before.collectives, after.collectives)


def _module(where: str) -> str:
    """The module of a place, if it has one, else file and line; without blanks, so that its numbers fold."""
    return where.partition("   (")[0].replace(" ", "_") if "   (" in where else where


def _phase(c: CollectivePlan) -> str:
    return f"{c.phase} again" if c.again else c.phase


def stage_changes(before: Tables, after: Tables) -> list[Change]:
    """Stage by stage: its rank, its blocks, its parameters, the values that it sends and receives."""
    columns = (
        Column("blocks", ("blocks",), _blocks_of),
        Column("receives", ("receives",), lambda s: _boundaries(s.receives)),
        Column("sends", ("sends",), lambda s: _boundaries(s.sends)),
    )
    table = Table(
        "Stages",
        name=lambda s: f"stage {s.index}",
        key=lambda s: s.index,
        tell=lambda s: f"pp rank {s.pp_rank}, {_blocks_of(s)}, {s.num_parameters:,} parameters",
        columns=columns,
        units={"num_parameters": ""},
    )
    return changes_of(table, before.stages, after.stages)


def _blocks_of(stage: StagePlan) -> str:
    names = ", ".join(item.name for item in fold(stage.blocks, str, lambda _: None))
    return f"{len(stage.blocks)}: {names}" if names else "no block"


def _boundaries(values: tuple[BoundaryPlan, ...]) -> str:
    return "; ".join(f"{v.name} {format_shape(v.shape)} {v.dtype}, {format_bytes(v.bytes)}" for v in values) or "-"


def schedule_changes(before: Tables, after: Tables) -> list[Change]:
    """Kind, microbatches and bubble; for each pp rank the microbatches in flight, and the order."""
    old, new = before.schedule, after.schedule
    found = [change("Schedule", "all ranks", "kind", old.kind, new.kind)]
    found.append(change("Schedule", "all ranks", "microbatches", old.num_microbatches, new.num_microbatches))
    found.append(change("Schedule", "all ranks", "bubble", old.bubble_fraction, new.bubble_fraction, SHARE))
    for rank in range(max(before.mesh.pp, after.mesh.pp)):
        peaks = (_at(old.peak_in_flight, rank), _at(new.peak_in_flight, rank))
        found.append(change("Schedule", f"pp rank {rank}", "in flight", *peaks))
    found = [c for c in found if c.before != c.after]
    ranks = range(max(len(old.orders), len(new.orders)))
    orders = [(rank, _order(before, rank), _order(after, rank)) for rank in ranks]
    return found + [change("Schedule", f"pp rank {rank}", "order", a, b) for rank, a, b in orders if a != b]


def _order(plan: Tables, rank: int) -> str | None:
    schedule: SchedulePlan = plan.schedule
    return format_order(schedule.orders[rank], plan.mesh.vpp) if rank < len(schedule.orders) else None


def _at(values: tuple[int, ...], index: int) -> int | None:
    return values[index] if index < len(values) else None


def optimizer_changes(before: Tables, after: Tables) -> list[Change]:
    """The optimizer's own keys, then buffer by buffer."""
    keys = ((name, getattr(before.optimizer, name), getattr(after.optimizer, name)) for name in _OWN)
    found = [change("Optimizer", "all buffers", name, old, new) for name, old, new in keys if old != new]
    table = Table(
        "Optimizer",
        name=lambda b: f"pp rank {b.pp_rank}, {b.dtype} / {b.gradient_dtype} over {b.reduced_over}",
        key=lambda b: (b.pp_rank, b.dtype, b.gradient_dtype, b.reduced_over),
        tell=lambda b: f"{b.num_elements:,} elements, {b.shard_elements:,} of them per dp rank, buckets {_buckets(b)}",
        columns=(Column("buckets", ("buckets",), _buckets),),
    )
    return found + changes_of(table, before.optimizer.buffers, after.optimizer.buffers)


_OWN = tuple(name for name in OptimizerPlan.__dataclass_fields__ if name != "buffers")


def _buckets(b: BufferPlan) -> str:
    largest = max((bucket.end - bucket.start for bucket in b.buckets), default=0)
    return f"{len(b.buckets)}, the largest of {largest:,} elements"


class _Blocks:
    """The block of a dotted name, of those that either plan names."""

    def __init__(self, *plans: Tables) -> None:
        self._names = {name for plan in plans for stage in plan.stages for name in stage.blocks}

    def __call__(self, name: str) -> str:
        parts = name.split(".", 100)
        prefixes = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
        return next((prefix for prefix in prefixes if prefix in self._names), "")
