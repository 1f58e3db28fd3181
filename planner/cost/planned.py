"""What a plan, and a search, count of one cut: its work, free of any cluster, and of a plan the row of seconds.

Decisions, Shards → CutWork        a trace of each stage, call by call (planner.trace.trace)
CutWork.at(micro)                  the same for another size of a microbatch: no capture, no trace
planner.cost.estimate              CutWork, a layout, a cluster → seconds and bytes

Weights in shards (``optimizer.reshard``) are freed after each use, or with auto once a step if they fit; a number: so
many blocks of each stage, the last ones, once a step: their backward is the first.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from passes.errors import PlanError
from passes.pieces import NONE
from planner.cluster.cluster import Cluster
from planner.compiled.pieces import decide_compiled
from planner.cost.cut.build import Builder
from planner.cost.cut.units import CutWork
from planner.cost.estimate import Estimate
from planner.cost.layout import CostPlan, Layout
from planner.cost.memory import MemoryRow, memory_rows
from planner.cost.seconds.phases import flops_of, flops_of_stages
from planner.decisions import Decisions
from planner.pipeline.kinds import KINDS
from planner.pipeline.schedule import Schedule, SchedulePlan
from planner.pipeline.zero_bubble import StageCosts
from planner.recompute.decide import decide_recompute
from planner.regions.regions import decide_regions
from planner.regions.static_memory import GraphSlots
from planner.sharding.residency import Unit
from planner.sharding.shards import Shards
from planner.spec.fields import AUTO
from planner.spec.spec import Spec
from planner.trace.lowered import Lowered


@dataclass(frozen=True)
class PlannedSeconds:
    """Of a plan with these stages, before and after its schedule is decided. ``cluster``: seconds are of one."""

    lowered: Lowered
    spec: Spec
    cluster: Cluster | None = None

    @cached_property
    def work(self) -> CutWork:
        return planned_work(self.lowered, self.spec)

    def cost_row(self, schedule: SchedulePlan, *, reshards: bool) -> CostPlan | None:
        """Seconds of a step; None without a cluster."""
        return None if self.cluster is None else self.estimate(schedule, self.cluster, reshards=reshards).cost

    def step_flops(self, schedule: SchedulePlan) -> float:
        """``flops`` of the row, for which no cluster is needed."""
        flops, _ = flops_of(self.work)
        return schedule.num_microbatches * flops / self.lowered.decisions.mesh.pp

    def stage_costs(self) -> StageCosts | None:
        """By which a schedule with W puts them: seconds, or without a cluster operations of products. None without W.

        Whether weights in shards are freed after each use, which is decided later, does not change them.
        """
        asked = self.spec.pipeline.schedule
        kind, orders = (asked.kind, asked.orders) if isinstance(asked, Schedule) else (asked, ())
        row = SchedulePlan(kind, self.spec.num_microbatches, orders)
        if not (row.has_weights or (kind in KINDS and KINDS[kind].waits)):
            return None
        if self.cluster is not None:
            return self.estimate(row, self.cluster).stage_costs
        return flops_of_stages(self.work, AS_PLANNED, self.work.ranges(_sizes(self.lowered.decisions)))

    def estimate(self, schedule: SchedulePlan, cluster: Cluster, *, reshards: bool = True) -> Estimate:
        """By the plan's decisions in the form of a layout."""
        decisions, spec = self.lowered.decisions, self.spec
        layout = Layout(
            decisions.mesh,
            spec.batch.micro,  # pyright: ignore[reportArgumentType] - a number, once it is planned
            schedule.num_microbatches,
            bool(spec.tensor_parallel.sequence_parallel),
            AS_PLANNED,
            schedule.kind,
            _sizes(decisions),
            spec.optimizer.planned_zero,
            reshards,
            schedule.orders if schedule.kind not in KINDS else (),
        )
        return Estimate(self.work, layout, cluster, spec)


def _sizes(decisions: Decisions) -> tuple[int, ...]:
    return tuple(map(len, decisions.stages.blocks_of_stage)) if decisions.blocks.instances else (1,)


def usable_bytes(cluster: Cluster) -> int:
    """Bytes of a device that a rank may fill."""
    return int(cluster.device.memory * cluster.device.usable_memory)


def too_large(memory: Sequence[MemoryRow], cluster: Cluster | None) -> Iterator[MemoryRow]:
    if cluster is not None:
        yield from (row for row in memory if row.total > usable_bytes(cluster))


def decide_reshard(
    asked: Any,
    lowered: Lowered,
    schedule: SchedulePlan,
    slots: Sequence[GraphSlots],
    cluster: Cluster | None,
) -> Lowered:
    """``lowered``, with the answer in its shards. ``asked``: of the spec; without a cluster auto is true. Raises
    PlanError for a number above that of the model's blocks."""
    if isinstance(asked, int) and not isinstance(asked, bool):
        blocks = sum(map(len, lowered.decisions.stages.blocks_of_stage))
        if asked > blocks:
            fix = f"set a number up to {blocks}, or false to gather all weights once a step"
            what = f"optimizer.reshard is {asked}, and the model has {blocks} blocks"
            raise PlanError(what, where="optimizer.reshard", fix=fix)
        return replace(lowered, shards=replace(lowered.shards, kept=_last(asked, lowered)))
    has_choice = schedule.num_microbatches > 1 and any(buffer.gathers for buffer in lowered.shards.buffers)
    if asked != AUTO or cluster is None or not has_choice:
        return lowered
    once = replace(lowered, shards=replace(lowered.shards, reshards=False))
    return lowered if any(too_large(memory_rows(once, schedule, slots, cluster), cluster)) else once


def _last(count: int, lowered: Lowered) -> tuple[frozenset[Unit], ...]:
    """Of each pp rank the units of the last visits of its stages."""
    mesh = lowered.decisions.mesh
    visits = [lowered.visits(stage)[-count:] for stage in range(lowered.num_stages)]
    return tuple(
        frozenset(unit for stage in mesh.stages_of(rank) for visit in visits[stage] for unit in visit.units)
        for rank in range(mesh.pp)
    )


AS_PLANNED = "as planned"  # the kind of recompute of a plan with a spec that names blocks


def cut_work(
    decisions: Decisions, shards: Shards, spec: Spec, kinds: Collection[str], *, ends: bool = False
) -> CutWork:
    """Decisions of any pp. ``kinds``: of recompute (none, full, selective) that the work is to know about. ``ends``: as
    CutWork has it."""
    lowered = Lowered(decisions, shards, decide_regions(spec.cuda_graphs, decisions, shards))
    pieces = {kind: () if kind == NONE else decide_recompute(kind, lowered) for kind in kinds}
    alone = replace(lowered, recomputed=next(iter(pieces.values())) if len(pieces) == 1 else ())
    compiled = decide_compiled(spec.compiles(on_gpu=decisions.on_gpu), alone).pieces
    return Builder(replace(lowered, pieces=compiled), spec, ends=ends or _stand_alone(decisions)).work(pieces)


def planned_work(lowered: Lowered, spec: Spec) -> CutWork:
    """Of a plan that is decided: only its own kind, and no memory, since a plan has rows for that."""
    builder = Builder(lowered, spec, ends=_stand_alone(lowered.decisions))
    return builder.work({AS_PLANNED: lowered.recomputed}, with_memory=False)


def _stand_alone(decisions: Decisions) -> bool:
    of_stages = decisions.stages.blocks_of_stage
    return len(of_stages) > 1 and not all(of_stages)
