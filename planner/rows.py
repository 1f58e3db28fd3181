"""Print what was decided: the plan's rows from the decisions. Every parameter, every collective."""

from __future__ import annotations

from planner.memory import LocalSizes, memory_of_ranks
from planner.frozen_plan import Plan
from planner.plan_rows import BoundaryPlan, MeshPlan, OptimizerPlan, SchedulePlan, StagePlan
from planner.rows_collectives import collective_rows
from planner.rows_diagnostics import diagnostic_rows, summary_row
from planner.rows_parameters import parameter_rows
from planner.schedule import Schedule
from planner.simulate import simulate
from planner.source import PlanSource
from planner.spec import Spec
from planner.collectives import sent_type


def plan_of(spec: Spec, source: PlanSource, schedule: Schedule) -> Plan:
    """The frozen Plan of all decisions."""
    mesh = source.mesh
    run = simulate(schedule)
    orders = tuple(tuple((a.kind, a.microbatch, a.chunk) for a in order) for order in schedule.orders)
    parameters = parameter_rows(source)
    local = LocalSizes(mesh.tp, {name: option.out for name, option in source.placements.options.items()})
    return Plan(
        spec=spec.to_dict(),
        mesh=MeshPlan(mesh.tp, mesh.pp, mesh.vpp, mesh.dp, mesh.cp, mesh.ep, mesh.etp, mesh.edp, mesh.world_size, mesh.order),
        parameters=parameters,
        collectives=collective_rows(spec, source),
        stages=stage_rows(source),
        schedule=SchedulePlan(schedule.kind, schedule.num_microbatches, orders, run.bubble_fraction, tuple(run.peak_in_flight)),
        optimizer=OptimizerPlan((), spec.optimizer.name, spec.optimizer.zero, spec.optimizer.alignment),
        memory=memory_of_ranks(source.program, source.stages, mesh.pp, run.peak_in_flight, num_shards=mesh.dp,
                               zero=spec.optimizer.zero, local=local),
        diagnostics=diagnostic_rows(source),
        summary=summary_row(source, parameters),
        source=source,
    )


def stage_rows(source: PlanSource) -> tuple[StagePlan, ...]:
    """One row a stage: its blocks, its parameters on one rank, what crosses its borders."""
    stages, mesh = source.stages, source.mesh
    rows = []
    for index in range(stages.num_stages):
        blocks = tuple(source.blocks.instances[b].path for b in stages.blocks_of_stage[index])
        held = [n for n, where in stages.parameter_stages.items() if index in where and n in source.program.parameters]
        count = sum(LocalSizes(mesh.tp, {n: source.placements.options[n].out}).num_elements(source.program.node(n)) for n in held)
        rows.append(StagePlan(index, index % mesh.pp, index // mesh.pp, blocks, count,
                              _boundaries(source, stages.live[index - 1] if index else ()),
                              _boundaries(source, stages.live[index] if index < stages.num_stages - 1 else ())))
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
        result.append(BoundaryPlan(name, shape, str(value.dtype).removeprefix("torch."), size, str(placement),
                                   bool(node.meta["grad"])))
    return tuple(result)



