"""Print what was decided: the plan's rows from the decisions. Every parameter, every collective."""

from __future__ import annotations

from collections.abc import Iterator

from planner.cost.memory import LocalSizes, memory_of_ranks
from planner.decisions import PlanSource
from planner.frozen_plan import Plan
from planner.graph.places import Places
from planner.pipeline.schedule import Schedule
from planner.pipeline.simulate import simulate
from planner.placement.attention_sites import attention_sites, check_attention
from planner.sharding.buffers import Buffer, buffers_of, exact_memory, optimizer_plan, step_rows
from planner.sharding.type_changes import sent_type
from planner.spec.spec import Spec
from planner.tables.collectives import collective_rows
from planner.tables.diagnostics import diagnostic_rows, summary_row
from planner.tables.parameters import parameter_rows
from planner.tables.reasons import Reasons
from planner.tables.rows import BoundaryPlan, Diagnostic, MemoryRow, SchedulePlan, StagePlan
from planner.tables.uncut import check_something_is_cut


def plan_of(spec: Spec, source: PlanSource, schedule: Schedule) -> Plan:
    """The frozen Plan of all decisions. Raises PlanError where tp divides no attention of the model, or nothing."""
    places = Places(source.blocks)
    sites = attention_sites(source.program, source.blocks, source.placements)
    check_attention(source.program, source.placements, sites)
    check_something_is_cut(source, sites, spec.tensor_parallel.vocabulary_multiple)
    reasons, buffers = Reasons(source, sites), buffers_of(spec, source)
    run = simulate(schedule)
    orders = tuple(tuple((a.kind, a.microbatch, a.chunk) for a in order) for order in schedule.orders)
    parameters = parameter_rows(spec, source, reasons, places)
    peaks = tuple(run.peak_in_flight)
    return Plan(
        spec=spec.to_dict(),
        mesh=source.mesh,
        parameters=parameters,
        collectives=(*collective_rows(source, places), *step_rows(spec, source, buffers)),
        stages=stage_rows(source),
        schedule=SchedulePlan(schedule.kind, schedule.num_microbatches, orders, run.bubble_fraction, peaks),
        optimizer=optimizer_plan(spec, buffers),
        memory=memory_rows(spec, source, buffers, peaks),
        diagnostics=(
            *schedule_warnings(schedule, run.bubble_fraction),
            *diagnostic_rows(source, parameters, sites, reasons, places),
        ),
        summary=summary_row(source, parameters),
        source=source,
    )


def schedule_warnings(schedule: Schedule, bubble_fraction: float) -> Iterator[Diagnostic]:
    """Fewer microbatches than ranks of the pipeline: it runs and is right, but ranks wait more than they must."""
    if schedule.num_microbatches < schedule.pp:
        count = schedule.num_microbatches
        yield Diagnostic(
            "warning",
            f"{count} microbatch{'es do' if count > 1 else ' does'} not fill a pipeline of {schedule.pp} ranks: they "
            f"wait {bubble_fraction:.0%} of the time (bubble)",
            "batch.global",
            f"use {schedule.pp} microbatches or more (batch.global from {schedule.pp} · micro · dp), or lower pp",
        )


def memory_rows(
    spec: Spec, source: PlanSource, buffers: tuple[Buffer, ...], in_flight: tuple[int, ...]
) -> tuple[MemoryRow, ...]:
    """Estimated activations; parameters, gradients and optimizer as the buffers hold them."""
    mesh = source.mesh
    local = LocalSizes(mesh.tp, {name: option.out for name, option in source.placements.options.items()})
    rows = memory_of_ranks(
        source.program, source.stages, mesh.pp, in_flight, num_shards=mesh.dp, zero=spec.optimizer.zero, local=local
    )
    return exact_memory(spec, source, buffers, rows)


def stage_rows(source: PlanSource) -> tuple[StagePlan, ...]:
    """One row a stage: its blocks, its parameters on one rank, what crosses its borders."""
    stages, mesh = source.stages, source.mesh
    placeholders = source.program.parameters
    rows = []
    for index in range(stages.num_stages):
        blocks = tuple(source.blocks.instances[b].path for b in stages.blocks_of_stage[index])
        held = [source.program.node(n) for n in placeholders if index in stages.parameter_stages.get(n, ())]
        count = sum(node.meta["val"].numel() for node in held)
        rows.append(
            StagePlan(
                index,
                index % mesh.pp,
                index // mesh.pp,
                blocks,
                count,
                _boundaries(source, stages.live[index - 1] if index else ()),
                _boundaries(source, stages.live[index] if index < stages.num_stages - 1 else ()),
            )
        )
    return tuple(rows)


def _boundaries(source: PlanSource, names: tuple[str, ...]) -> tuple[BoundaryPlan, ...]:
    result = []
    for name in names:
        node = source.program.node(name)
        placement, value = sent_type(source.placements.of(node)), node.meta["val"]
        shape = placement.local_shape(tuple(value.shape), source.mesh.tp)
        size = value.element_size()
        for n in shape:
            size *= n
        result.append(
            BoundaryPlan(
                name, shape, str(value.dtype).removeprefix("torch."), size, str(placement), bool(node.meta["grad"])
            )
        )
    return tuple(result)
