"""The schedule with times: seconds of each stage from the cluster file, or else units, scaled to the measured step."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cluster.read import read_cluster
from planner.cost.planned import planned_stage_seconds
from planner.frozen_plan import Plan
from planner.pipeline.schedule import Action, Schedule
from planner.pipeline.simulate import simulate
from planner.saved.lowered import Lowered
from planner.spec.spec import Spec


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Of each pp rank its actions with start and end, from the first start on. ``has_seconds``: they are seconds by the
    plan's cost; else units: a forward takes 1 and a backward 2."""

    actions: tuple[tuple[tuple[Action, float, float], ...], ...]
    duration: float
    has_seconds: bool

    def scaled(self, seconds: float) -> PlannedRun:
        """A plan without seconds, scaled to take ``seconds`` in all."""
        if self.has_seconds or not self.duration:
            return self
        by = seconds / self.duration
        actions = tuple(tuple((a, by * start, by * end) for a, start, end in rank) for rank in self.actions)
        return PlannedRun(actions, seconds, False)


def planned_run(plan: Plan, cluster: str | None) -> PlannedRun:
    """Of a plan that can run. ``cluster``: the file that its spec names. Messages between stages take no time."""
    mesh, row = plan.mesh, plan.schedule
    schedule = Schedule(row.kind, mesh.pp, mesh.vpp, row.num_microbatches, mesh.pp, row.actions, mesh.fold)
    seconds = None
    if cluster is not None and plan.cost is not None:
        spec = Spec.load({**plan.spec, "cluster": None})
        seconds = planned_stage_seconds(
            Lowered(*plan.to_run(), plan.regions), spec, row, plan.recomputed, read_cluster(cluster)
        )
    run = simulate(schedule) if seconds is None else simulate(schedule, *seconds)
    actions = tuple(
        tuple((action, *span) for action, span in zip(order, spans, strict=True))
        for order, spans in zip(schedule.orders, run.spans, strict=True)
    )
    return PlannedRun(actions, run.duration, seconds is not None)
