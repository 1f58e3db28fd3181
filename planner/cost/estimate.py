"""Seconds and bytes of one layout: the cost of a cut on a cluster.

    step    run of the pipeline (planner.pipeline.clock)
            + exposed gradient reduction + norm + update + exposed all-gather of parameters
    parts   compute, recompute, tp_comm, cp_comm, ep_comm of the busiest rank; pp_comm is the time that messages between
            stages add, and pp_bubble the rest of the pipeline's run. The parts sum to step_seconds.

``at_least`` is a cheap lower bound of the cost: it assumes a perfect pipeline, and counts only work that no overlap can
hide.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

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
    """The predicted seconds and bytes of one layout, computed on first use: most layouts of a search do not fit.

    ``cut``: the work for the layout's tp, cp, ep and sequence parallelism, for any stages and microbatch size.
    """

    cut: CutWork = field(repr=False)
    layout: Layout
    cluster: Cluster = field(repr=False)
    spec: Spec = field(repr=False)

    @cached_property
    def work(self) -> CutWork:
        return self.cut.at(self.layout.micro)

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        ranges, num_units = self.work.ranges(self.layout.sizes), len(self.work.units)
        require(ranges[-1][1] == num_units, f"{ranges[-1][1]} units are distributed out of {num_units}")
        return ranges

    # ---- bytes

    @cached_property
    def holds(self) -> list[RankHolds]:
        of_ranks, layout = [], self.layout
        for rank in range(layout.mesh.pp):
            own = layout.mesh.stages_of(rank)
            others = [of for stage, of in enumerate(self.ranges) if stage not in own]
            of_ranks.append(rank_holds(self.work, [self.ranges[stage] for stage in own], others, layout, self.spec))
        return of_ranks

    @cached_property
    def memory(self) -> tuple[MemoryRow, ...]:
        layout, mesh, rows = self.layout, self.layout.mesh, list[MemoryRow]()
        stages = shared_once([stage_bytes(self.work, layout, *of) for of in self.ranges], mesh)
        for rank, holds in enumerate(self.holds):
            kept = (stages[stage].kept for stage in mesh.stages_of(rank))
            at = peak_of_rank(rank, layout, stages, self.spec.pipeline.group_size)
            rows.append(row_of(rank, at, holds.lasting, kept))
        return with_axes(rows, mesh, self.cluster, [_axes_of(holds, mesh) for holds in self.holds])

    # ---- seconds

    @cached_property
    def cost(self) -> CostPlan:
        layout, run, alone = self.layout, self._run(messages=True), self._run(messages=False)
        ranks = range(layout.mesh.pp)
        longest = max(map(self._busy, ranks), key=lambda spent: spent.total)
        ends = [self._end(rank, run.starts[rank]) for rank in ranks]
        reduced = max(end + of.reduce for end, of in zip(run.ends, ends, strict=True))
        update, gather = max(e.update for e in ends), max(e.gather for e in ends)
        norm = norm_seconds(self._pricing, self.work.num_noted)
        step = self._counting() + max(reduced, run.seconds) + norm + update + gather
        parts = {
            **{name: getattr(longest, name) for name in ("compute", "recompute", "tp_comm", "cp_comm", "ep_comm")},
            "pp_comm": max(0.0, run.seconds - alone.seconds),
            "dp_comm": longest.dp_comm + max(0.0, reduced - run.seconds) + norm + gather,
            "optimizer": update,
        }
        parts["pp_bubble"] = max(0.0, step - sum(parts.values()))
        units = self._units
        done = {
            "flops": layout.num_microbatches * units.flops / layout.mesh.pp,
            "peak": peak_of(self.cluster.device, units.dtype) if units.dtype else 0.0,
        }
        return CostPlan(step_seconds=sum(parts.values()), **parts, **done).with_range(self.cluster.uncertainty)

    @cached_property
    def at_least(self) -> float:
        """A lower bound of the seconds of ``cost``.

        For each rank: its work for all microbatches, plus one pass through the earlier stages, forward and backward;
        only the forward if weight gradients can fill the wait during the backward.
        """
        layout, units, ranges = self.layout, self._units_if(1.0), self.ranges
        until, before_it = units.until, units.forward_until if layout.waits else units.until
        most, before = 0.0, 0.0
        for rank in range(layout.mesh.pp):
            stages = layout.mesh.stages_of(rank)
            own = [until[end] - until[first] for first, end in (ranges[s] for s in stages)]
            most = max(most, before + layout.num_microbatches * sum(own))
            first, end = ranges[stages[0]]
            before += before_it[end] - before_it[first]
        return most * (1 - 1e-9)

    @property
    def stage_costs(self) -> StageCosts:
        """Seconds of one microbatch on each stage: forward, backward and, if the schedule has W, weight gradients;
        without collectives of sharded weights and gradients."""
        return _costs_of(self._computing(self._units))

    @cached_property
    def _slower(self) -> float:
        """The slowdown of ranks that share cores, relative to ranks with their own. Assumes that all cores are always
        busy: other ranks use the time in which one waits.
        """
        mesh, at_once = self.layout.mesh, self.cluster.device.at_once
        if at_once is None or mesh.world_size <= at_once:
            return 1.0
        sides = _costs_of(self._computing(self._units_if(1.0)))
        total = self.layout.num_microbatches * sum(map(sum, sides))
        alone = self._clock(sides, sides, group_size=mesh.pp).seconds
        return max(1.0, total / (mesh.pp * alone) * mesh.world_size / at_once)

    @cached_property
    def _pricing(self) -> Pricing:
        return Pricing(self.layout.mesh, self.cluster, self._slower)

    @property
    def _units(self) -> WorkSeconds:
        return self._units_if(self._slower)

    def _units_if(self, slower: float) -> WorkSeconds:
        """Return the seconds of the units, cached by the links of the axes that they communicate over."""
        work, kind, waits, cluster = self.work, self.layout.recompute, self.layout.waits, self.cluster
        axes = work.cache.get(("axes", kind))
        if axes is None:
            axes = work.cache["axes", kind] = _axes(work, kind)
        mesh = self.layout.mesh
        key = ("seconds", slower, kind, waits, id(cluster), *(group(mesh, axis, cluster) for axis in axes))  # pyright: ignore
        cached = work.cache.get(key)
        if cached is None:  # with the cluster, which stays alive as long as its id() is a key
            cached = work.cache[key] = (WorkSeconds(work, kind, Pricing(mesh, cluster, slower), waits=waits), cluster)
        return cached[0]  # pyright: ignore

    def _computing(self, units: WorkSeconds) -> list[UnitSeconds]:
        return [units.stage(*of) for of in self.ranges]

    @cached_property
    def _stages(self) -> list[UnitSeconds]:
        stages = self._computing(self._units)
        if self.layout.zero < 2:
            return stages
        exchanged = Exchanged(self.work, self.layout, self._pricing, self.spec)
        return [exchanged.beside(stage, *of) for stage, of in zip(stages, self.ranges, strict=True)]

    @cached_property
    def _messages(self) -> Delays:
        """Seconds of the messages across each stage boundary, forward and backward."""
        sent, returned, micro = list[float](), list[float](), self.work.micro
        for stage, (_, end) in enumerate(self.ranges[:-1]):
            level = neighbours(self.layout.mesh, self.cluster, stage)
            wire, after = self._pricing.wires[level or 0], () if level is None else self.work.units[end - 1].after
            sent.append(sum(send_seconds(v.bytes.at(micro), wire) for v in after))
            returned.append(sum(send_seconds(v.bytes.at(micro), wire) for v in after if v.has_gradient))
        return Delays(sent, returned)

    def _run(self, *, messages: bool) -> ClockRun:
        overlap, placed_by, delays = self.cluster.overlap, _costs_of(self._stages), None
        forward, backward, weights = (list(side) for side in placed_by)
        if messages:  # the part that does not overlap computation delays the sender
            for index, (there, back) in enumerate(zip(*self._messages, strict=True)):
                forward[index] += (1 - overlap) * there
                backward[index + 1] += (1 - overlap) * back
            delays = Delays(*([overlap * x for x in side] for side in self._messages))
        costs, group_size = StageCosts(forward, backward, weights), self.spec.pipeline.group_size
        return self._clock(placed_by, costs, delays, group_size=group_size or self.layout.mesh.pp)

    def _clock(
        self, placed_by: StageCosts, costs: StageCosts, delays: Delays | None = None, *, group_size: int
    ) -> ClockRun:
        """Run the pipeline with the ``costs`` of its stages; ``placed_by``: the costs that place its W."""
        layout = self.layout
        mesh, count, kind = layout.mesh, layout.num_microbatches, layout.schedule
        if layout.by_hand:
            return run_orders(layout.by_hand, mesh.fold, count, costs, delays)
        sizes = Sizes(mesh.pp, count, mesh.vpp, group_size)
        if layout.waits:
            return run_waiting(kind, sizes, placed_by, costs, delays)
        return run_table(kind, sizes, costs, delays)

    @property
    def _num_counted(self) -> int:
        """The number of microbatches with an additional forward, which counts sums of the loss."""
        count = self.layout.num_microbatches
        return count if self.work.reads_global_sums and count > 1 else 0

    def _busy(self, rank: int) -> Spent:
        total, count = Spent(), self.layout.num_microbatches
        for stage in (self._stages[s] for s in self.layout.mesh.stages_of(rank)):
            total = total.plus(stage.forward, count + self._num_counted)
            total = total.plus(stage.backward, count).plus(stage.weights, count)
        return total

    def _counting(self) -> float:
        """Return the seconds of the counting forwards: all stages once, then the slowest rank for each further one."""
        mesh, forward = self.layout.mesh, [stage.forward.total for stage in self._stages]
        slowest = max(sum(forward[s] for s in mesh.stages_of(rank)) for rank in range(mesh.pp))
        return sum(forward) + (self._num_counted - 1) * slowest if self._num_counted else 0.0

    def _end(self, rank: int, start: float) -> EndOfStep:
        first = self._stages[self.layout.mesh.stages_of(rank)[0]]
        return end_of_step(
            self.holds[rank],
            self._pricing,
            zero=self.layout.zero,
            last_backward=first.weights.total or first.backward.total,  # buckets get their last gradients here
            until_first_forward_ends=start + first.forward.total,
        )


def _axes_of(holds: RankHolds, mesh: Mesh) -> set[str]:
    """Return the axes over which the buffers of a rank are reduced, gathered or updated."""
    axes = set[str]()
    for b in holds.buffers:
        tied, updated = "" if b.tied else None, b.shared_by if b.matrices else ""
        axes |= exchange_axes(mesh, b.reduced_over, tied, gathers=b.zero == 3, matrices=updated)
    return axes


def _costs_of(stages: Sequence[UnitSeconds]) -> StageCosts:
    return StageCosts(*([spent.total for spent in side] for side in zip(*stages, strict=True)))


def _axes(work: CutWork, kind: str) -> tuple[str, ...]:
    """Return the axes over which the units of ``work`` communicate."""
    units = {id(unit): unit for unit in work.units}.values()
    phases = [unit.again[kind] for unit in units]
    phases += [phase for part in (*units, *work.shared) for phase in (part.work.forward, part.work.backward)]
    return tuple(sorted({message.axis for phase in phases for message, _ in phase.messages}))
