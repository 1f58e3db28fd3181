"""Seconds and bytes of one layout: the cost of a cut on a cluster.

    step    the pipeline's run (planner.pipeline.clock)
            + what of the gradients' sums is not hidden, the norm, the update, what of the gather is not hidden
    parts   of the rank that works longest: compute, recompute, tp_comm, cp_comm, ep_comm; what messages between stages
            add is pp_comm, and what is left of the pipeline's run its bubble. They sum to step_seconds.

at_least is cheap and never more than the estimate: it assumes a perfect pipeline, and counts only work that no overlap
can hide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from passes.errors import require
from planner.cluster.cluster import Cluster
from planner.cluster.links import group, neighbours, send_seconds
from planner.cost.cut.units import CutWork
from planner.cost.layout import CostPlan, Layout
from planner.cost.memory import MemoryRow, exchange_axes, row_of, shared_once, with_axes
from planner.cost.seconds.buffers import RankHolds, peak_of_rank, rank_holds, stage_bytes
from planner.cost.seconds.phases import Pricing, Spent, UnitSeconds, WorkSeconds, peak_of
from planner.cost.seconds.step import EndOfStep, Exchanged, end_of_step, norm_seconds
from planner.mesh import Mesh
from planner.pipeline.clock import ClockRun, Delays, run_orders, run_table, run_waiting
from planner.pipeline.kinds import Sizes
from planner.pipeline.zero_bubble import StageCosts
from planner.spec.spec import Spec


@dataclass(frozen=True)
class Estimate:
    """``memory``: one row for each pp rank. ``cost`` is computed when it is first read: most layouts that a search
    looks at do not fit."""

    memory: tuple[MemoryRow, ...]
    price: Callable[[], CostPlan] = field(repr=False, compare=False)

    @cached_property
    def cost(self) -> CostPlan:
        return self.price()


def estimate(work: CutWork, layout: Layout, cluster: Cluster, spec: Spec) -> Estimate:
    """``work``: of the layout's tp, cp, ep and sequence parallelism, in any number of stages."""
    work = work.at(layout.micro)
    ranges = work.ranges(layout.sizes)
    holds = rank_holdings(work, layout, spec)
    stages = shared_once([stage_bytes(work, layout, *of) for of in ranges], layout.mesh)
    group_size = spec.pipeline.group_size
    rows = list[MemoryRow]()
    for rank, held in enumerate(holds):
        kept = (stages[stage].kept for stage in layout.mesh.stages_of(rank))
        rows.append(row_of(rank, peak_of_rank(rank, layout, stages, group_size), held.lasting, kept))
    further = [_axes_of(rank, layout.mesh) for rank in holds]
    return Estimate(
        with_axes(rows, layout.mesh, cluster, further), partial(cost_of, work, layout, cluster, spec, holds)
    )


def _axes_of(holds: RankHolds, mesh: Mesh) -> set[str]:
    """Over which its buffers are exchanged."""
    found = set[str]()
    for b in holds.buffers:
        tied, updated = "" if b.tied else None, b.shared_by if b.matrices else ""
        found |= exchange_axes(mesh, b.reduced_over, tied, gathers=b.zero == 3, matrices=updated)
    return found


def rank_holdings(work: CutWork, layout: Layout, spec: Spec) -> list[RankHolds]:
    """Of each pp rank."""
    ranges = work.ranges(layout.sizes)
    require(ranges[-1][1] == len(work.units), f"{ranges[-1][1]} units are distributed out of {len(work.units)}")
    found = []
    for rank in range(layout.mesh.pp):
        own = layout.mesh.stages_of(rank)
        others = [of for stage, of in enumerate(ranges) if stage not in own]
        found.append(rank_holds(work, [ranges[stage] for stage in own], others, layout, spec))
    return found


def cost_of(
    work: CutWork, layout: Layout, cluster: Cluster, spec: Spec, holds: Sequence[RankHolds] | None = None
) -> CostPlan:
    """The row of seconds. ``work`` is that of the layout's microbatch."""
    holds = rank_holdings(work, layout, spec) if holds is None else holds
    slower = _slower(work, layout, cluster)
    of_units = _seconds_of(work, layout, cluster, slower)
    pricing = Pricing(layout.mesh, cluster, slower)
    ranges, pp, count = work.ranges(layout.sizes), layout.mesh.pp, layout.num_microbatches
    stages = [of_units.stage(*of) for of in ranges]
    if layout.zero >= 2:
        exchanged = Exchanged(work, layout, pricing, spec)
        stages = [exchanged.beside(stage, *of) for stage, of in zip(stages, ranges, strict=True)]
    sent, returned = _messages(work, ranges, pricing)
    step = _Step(work, layout, spec, pricing, stages, sent, returned, holds)
    peak = peak_of(cluster.device, of_units.dtype) if of_units.dtype else 0.0
    found = replace(step.cost(), flops=count * of_units.flops / pp, peak=peak)
    return found.with_range(cluster.uncertainty)


def stage_seconds(work: CutWork, layout: Layout, cluster: Cluster) -> StageCosts:
    """Seconds of one microbatch's forward, backward and, if the schedule has W, weight gradients on each stage.

    As ``cost_of`` takes them.
    """
    of_units = _seconds_of(work, layout, cluster, _slower(work, layout, cluster))
    return costs_of([of_units.stage(*of) for of in work.ranges(layout.sizes)])


def costs_of(stages: Sequence[UnitSeconds]) -> StageCosts:
    return StageCosts(*([spent.total for spent in side] for side in zip(*stages, strict=True)))


def _slower(work: CutWork, layout: Layout, cluster: Cluster) -> float:
    """The slowdown of a pipeline with processes that share cores, against one with cores of its own.

    All cores are taken to be busy: the others use the time that a rank waits.
    """
    mesh, at_once = layout.mesh, cluster.device.at_once
    if at_once is None or mesh.world_size <= at_once:
        return 1.0
    stages = [_seconds_of(work, layout, cluster).stage(*of) for of in work.ranges(layout.sizes)]
    sides = costs_of(stages)
    total = layout.num_microbatches * sum(map(sum, sides))
    return max(1.0, total / (mesh.pp * run_of(layout, sides, sides).seconds) * mesh.world_size / at_once)


def run_of(
    layout: Layout,
    placed_by: StageCosts,
    costs: StageCosts,
    delays: Delays | None = None,
    group_size: int | None = None,
) -> ClockRun:
    """A layout's pipeline, by the seconds of its stages; ``placed_by``: those by which its W are put."""
    mesh, count, kind = layout.mesh, layout.num_microbatches, layout.schedule
    if layout.by_hand:
        return run_orders(layout.by_hand, mesh.fold, count, costs, delays)
    sizes = Sizes(mesh.pp, count, mesh.vpp, group_size or mesh.pp)
    if layout.waits:
        return run_waiting(kind, sizes, placed_by, costs, delays)
    return run_table(kind, sizes, costs, delays)


def _seconds_of(work: CutWork, layout: Layout, cluster: Cluster, slower: float = 1.0) -> WorkSeconds:
    """The same for all meshes with the same links under the axes on which the units communicate."""
    kind, mesh, waits = layout.recompute, layout.mesh, layout.waits
    axes = work.cache.get(("axes", kind))
    if axes is None:
        axes = work.cache["axes", kind] = _axes(work, kind)
    key = ("seconds", slower, kind, waits, id(cluster), *(group(mesh, axis, cluster) for axis in axes))  # pyright: ignore
    found = work.cache.get(key)
    if found is None:
        found = work.cache[key] = (WorkSeconds(work, kind, Pricing(mesh, cluster, slower), waits=waits), cluster)
    return found[0]  # pyright: ignore


def _axes(work: CutWork, kind: str) -> tuple[str, ...]:
    """Over which the units of ``work`` exchange."""
    units = {id(unit): unit for unit in work.units}.values()
    phases = [unit.again[kind] for unit in units]
    phases += [phase for part in (*units, *work.shared) for phase in (part.work.forward, part.work.backward)]
    return tuple(sorted({message.axis for phase in phases for message, _ in phase.messages}))


def _messages(work: CutWork, ranges: Sequence[tuple[int, int]], pricing: Pricing) -> tuple[list[float], list[float]]:
    """Seconds of the messages across each stage boundary, forward and backward."""
    mesh, sent, returned = pricing.mesh, list[float](), list[float]()
    for stage, (_, end) in enumerate(ranges[:-1]):
        level = neighbours(mesh, pricing.cluster, stage)
        wire, after = pricing.wires[level or 0], () if level is None else work.units[end - 1].after
        sent.append(sum(send_seconds(v.bytes.at(work.micro), wire) for v in after))
        returned.append(sum(send_seconds(v.bytes.at(work.micro), wire) for v in after if v.has_gradient))
    return sent, returned


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a layout: its stages, its messages, and the memory of its ranks."""

    work: CutWork
    layout: Layout
    spec: Spec
    pricing: Pricing
    stages: list[UnitSeconds]
    sent: list[float]
    returned: list[float]
    holds: Sequence[RankHolds]

    @property
    def counted(self) -> int:
        """Microbatches with a forward more, for the sums of the loss."""
        count = self.layout.num_microbatches
        return count if self.work.reads_global_sums and count > 1 else 0

    def _run(self, *, messages: bool) -> ClockRun:
        overlap, placed_by = self.pricing.cluster.overlap, costs_of(self.stages)
        forward, backward, weights = (list(side) for side in placed_by)
        delays = None
        if messages:  # the part that does not overlap computation is the sender's time
            for index, (there, back) in enumerate(zip(self.sent, self.returned, strict=True)):
                forward[index] += (1 - overlap) * there
                backward[index + 1] += (1 - overlap) * back
            delays = Delays(*([overlap * x for x in side] for side in (self.sent, self.returned)))
        costs = StageCosts(forward, backward, weights)
        return run_of(self.layout, placed_by, costs, delays, self.spec.pipeline.group_size)

    def cost(self) -> CostPlan:
        run, alone = self._run(messages=True), self._run(messages=False)
        busy = [self._busy(rank) for rank in range(self.layout.mesh.pp)]
        longest = max(busy, key=lambda spent: spent.total)
        ends = [self._end(rank, run.starts[rank]) for rank in range(self.layout.mesh.pp)]
        reduced = max(end + of.reduce for end, of in zip(run.ends, ends, strict=True))
        update, gather = max(e.update for e in ends), max(e.gather for e in ends)
        norm = norm_seconds(self.pricing, self.work.num_noted)
        step = self._counting() + max(reduced, run.seconds) + norm + update + gather
        parts = {
            **{name: getattr(longest, name) for name in ("compute", "recompute", "tp_comm", "cp_comm", "ep_comm")},
            "pp_comm": max(0.0, run.seconds - alone.seconds),
            "dp_comm": longest.dp_comm + max(0.0, reduced - run.seconds) + norm + gather,
            "optimizer": update,
        }
        parts["pp_bubble"] = max(0.0, step - sum(parts.values()))
        return CostPlan(step_seconds=sum(parts.values()), **parts)

    def _busy(self, rank: int) -> Spent:
        total, count = Spent(), self.layout.num_microbatches
        for stage in (self.stages[s] for s in self.layout.mesh.stages_of(rank)):
            total = total.plus(stage.forward, count + self.counted)
            total = total.plus(stage.backward, count).plus(stage.weights, count)
        return total

    def _counting(self) -> float:
        """Seconds of the forwards that only count sums: all stages once, then the slowest rank again and again."""
        forward = [stage.forward.total for stage in self.stages]
        slowest = max(sum(forward[s] for s in self.layout.mesh.stages_of(rank)) for rank in range(self.layout.mesh.pp))
        return sum(forward) + (self.counted - 1) * slowest if self.counted else 0.0

    def _end(self, rank: int, start: float) -> EndOfStep:
        first = self.stages[self.layout.mesh.stages_of(rank)[0]]
        return end_of_step(
            self.holds[rank],
            self.pricing,
            zero=self.layout.zero,
            last_backward=first.weights.total or first.backward.total,  # buckets get their last gradients here
            until_first_forward_ends=start + first.forward.total,
        )


def at_least(work: CutWork, layout: Layout, cluster: Cluster, spec: Spec) -> float:
    """Seconds that no estimate of this layout falls below.

    Of each rank: its work for all microbatches, and one pass through the stages before it, forward and backward; only
    forward if its weight gradients may fill the way back.
    """
    found = _seconds_of(work.at(layout.micro), layout, cluster)
    until, before_it = found.until, found.forward_until if layout.waits else found.until
    mesh, ranges = layout.mesh, work.ranges(layout.sizes)
    most, before = 0.0, 0.0
    for rank in range(mesh.pp):
        own = [until[end] - until[first] for first, end in (ranges[s] for s in mesh.stages_of(rank))]
        most = max(most, before + layout.num_microbatches * sum(own))
        first, end = ranges[mesh.stages_of(rank)[0]]
        before += before_it[end] - before_it[first]
    return most * (1 - 1e-9)
