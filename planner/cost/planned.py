"""The work of one cut, for plans and for the search, and the predicted seconds of a plan.

Decisions, Shards → CutWork        from a trace of each stage, call by call (planner.trace.trace)
CutWork.at(micro)                  the same cut for another microbatch size, without a new capture or trace
planner.cost.estimate              CutWork, a layout, a cluster → seconds and bytes

``optimizer.reshard`` decides when sharded weights are freed: after each use, or once a step; auto: once a step if they
fit. A number frees those of the last so many blocks of each stage once a step: their backward comes first.
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
    """The predicted work and seconds of a plan, usable before its schedule is decided. Seconds need a ``cluster``."""

    lowered: Lowered
    spec: Spec
    cluster: Cluster | None = None

    @cached_property
    def work(self) -> CutWork:
        return planned_work(self.lowered, self.spec)

    def cost_row(self, schedule: SchedulePlan, *, reshards: bool) -> CostPlan | None:
        """Return the predicted seconds of a step; None without a cluster."""
        return None if self.cluster is None else self.estimate(schedule, self.cluster, reshards=reshards).cost

    def step_flops(self, schedule: SchedulePlan) -> float:
        """Return ``flops`` of the cost row, which needs no cluster."""
        flops, _ = flops_of(self.work)
        return schedule.num_microbatches * flops / self.lowered.decisions.mesh.pp

    def stage_costs(self) -> StageCosts | None:
        """Return the costs that place the W of a schedule: seconds, or FLOPs without a cluster. None without W.

        They do not depend on when sharded weights are freed, which is decided later.
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
        """Return the estimate for the plan's decisions, converted to a layout."""
        decisions, spec = self.lowered.decisions, self.spec
        layout = Layout(
            decisions.mesh,
            spec.batch.micro,  # pyright: ignore[reportArgumentType] - a number in a plan
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
    """Return the bytes of a device that a rank may use."""
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
    """Return ``lowered`` with the decision in its shards. ``asked``: ``optimizer.reshard``; auto without a cluster is
    true. Raises PlanError for a number that exceeds the model's blocks."""
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
    """Return, for each pp rank, the units of the last ``count`` visits of each of its stages."""
    mesh = lowered.decisions.mesh
    visits = [lowered.visits(stage)[-count:] for stage in range(lowered.num_stages)]
    return tuple(
        frozenset(unit for stage in mesh.stages_of(rank) for visit in visits[stage] for unit in visit.units)
        for rank in range(mesh.pp)
    )


AS_PLANNED = "as planned"  # the kind of recomputation of a plan, which may differ from block to block


def cut_work(
    decisions: Decisions, shards: Shards, spec: Spec, kinds: Collection[str], *, ends: bool = False
) -> CutWork:
    """Return the work of a cut. ``kinds``: kinds of recomputation (none, full, selective) to include; ``ends``: as in
    CutWork."""
    lowered = Lowered(decisions, shards, decide_regions(spec.cuda_graphs, decisions, shards))
    pieces = {kind: () if kind == NONE else decide_recompute(kind, lowered) for kind in kinds}
    alone = replace(lowered, recomputed=next(iter(pieces.values())) if len(pieces) == 1 else ())
    compiled = decide_compiled(spec.compiles(on_gpu=decisions.on_gpu), alone).pieces
    return Builder(replace(lowered, pieces=compiled), spec, ends=ends or _stand_alone(decisions)).work(pieces)


def planned_work(lowered: Lowered, spec: Spec) -> CutWork:
    """Return the work of a decided plan, with its own recomputation; without memory, which a plan has in rows."""
    builder = Builder(lowered, spec, ends=_stand_alone(lowered.decisions))
    return builder.work({AS_PLANNED: lowered.recomputed}, with_memory=False)


def _stand_alone(decisions: Decisions) -> bool:
    of_stages = decisions.stages.blocks_of_stage
    return len(of_stages) > 1 and not all(of_stages)
