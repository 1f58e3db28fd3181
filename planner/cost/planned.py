"""The row of seconds of a plan, from its own decisions, and its memory compared with that of its devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from passes.pieces import Piece
from planner.cluster.cluster import Cluster
from planner.cost.estimate import cost_of, stage_seconds
from planner.cost.layout import Layout
from planner.cost.memory import MemoryRow
from planner.cost.seconds.phases import flops_of, flops_of_stages
from planner.cost.step_time import CostPlan
from planner.cost.work import AS_PLANNED, planned_work
from planner.decisions import Decisions
from planner.pipeline.schedule import KINDS, SchedulePlan
from planner.pipeline.zero_bubble import StageCosts
from planner.saved.lowered import Lowered
from planner.spec.spec import Spec


def cost_row(
    lowered: Lowered,
    spec: Spec,
    schedule: SchedulePlan,
    recomputed: Sequence[Piece],
    cluster: Cluster | None,
) -> CostPlan | None:
    """Seconds of a step on ``cluster``; None without one."""
    if cluster is None:
        return None
    work = planned_work(lowered, spec, recomputed)
    return cost_of(work, _layout(lowered, spec, schedule), cluster, spec)


def step_flops(lowered: Lowered, spec: Spec, schedule: SchedulePlan, recomputed: Sequence[Piece]) -> float:
    """``flops`` of the row, for which no cluster is needed."""
    flops, _ = flops_of(planned_work(lowered, spec, recomputed), AS_PLANNED)
    return schedule.num_microbatches * flops / lowered.decisions.mesh.pp


def planned_stage_seconds(
    lowered: Lowered,
    spec: Spec,
    schedule: SchedulePlan,
    recomputed: Sequence[Piece],
    cluster: Cluster,
) -> StageCosts:
    """Seconds of one microbatch's forward, backward and deferred weight gradients, on each stage."""
    work = planned_work(lowered, spec, recomputed)
    return stage_seconds(work, _layout(lowered, spec, schedule), cluster)


def costs_of_stages(
    lowered: Lowered, spec: Spec, kind: str, recomputed: Sequence[Piece], cluster: Cluster | None
) -> StageCosts | None:
    """By which a schedule with W puts them: seconds on ``cluster``, else operations of products. None without W."""
    if not KINDS[kind].waits:
        return None
    work = planned_work(lowered, spec, recomputed)
    if cluster is not None:
        return stage_seconds(work, _layout(lowered, spec, SchedulePlan(kind, spec.num_microbatches, ())), cluster)
    return flops_of_stages(work, AS_PLANNED, work.ranges(_sizes(lowered.decisions)))


def _layout(lowered: Lowered, spec: Spec, schedule: SchedulePlan) -> Layout:
    """The plan's decisions in the form of a layout, for its cost."""
    decisions = lowered.decisions
    return Layout(
        decisions.mesh,
        spec.batch.micro,  # pyright: ignore[reportArgumentType] - a number, once it is planned
        schedule.num_microbatches,
        bool(spec.tensor_parallel.sequence_parallel),
        AS_PLANNED,
        schedule.kind,
        _sizes(decisions),
        spec.optimizer.planned_zero,
        lowered.shards.reshards,
    )


def _sizes(decisions: Decisions) -> tuple[int, ...]:
    return tuple(map(len, decisions.stages.blocks_of_stage)) if decisions.blocks.instances else (1,)


def usable_bytes(cluster: Cluster) -> int:
    """Bytes of a device that a rank may fill."""
    return int(cluster.device.memory * cluster.device.usable_memory)


def too_large(memory: Sequence[MemoryRow], cluster: Cluster | None) -> Iterator[MemoryRow]:
    """The rows that do not fit a device."""
    if cluster is not None:
        yield from (row for row in memory if row.total > usable_bytes(cluster))
