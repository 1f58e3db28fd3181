"""Build every row of a plan from the decisions. Nothing is decided here, and nothing refused."""

from __future__ import annotations

from collections.abc import Iterator

from passes.blocks.places import Places
from passes.pieces import Piece
from passes.regions import Region
from planner.cluster.cluster import Cluster
from planner.compiled.pieces import Compiled
from planner.compiled.rows import rows_of as compiled_rows
from planner.cost.memory import MemoryRow
from planner.cost.planned import too_large, usable_bytes
from planner.cost.step_time import CostPlan
from planner.decisions import Decisions
from planner.exchanges.collectives import collective_rows
from planner.exchanges.weights import weight_rows
from planner.pipeline.schedule import SchedulePlan
from planner.placement.attention.sites import AttentionSite
from planner.recompute.rows import rows_of as recompute_rows
from planner.regions.regions import rows_of
from planner.regions.static_memory import GraphSlots
from planner.saved.lowered import Lowered
from planner.sharding.shards import Shards
from planner.spec.spec import Spec
from planner.tables.diagnostics import diagnostic_rows, summary_row
from planner.tables.documents import documents_notes
from planner.tables.experts import experts_rows
from planner.tables.graph_rounding import graph_rounding_warnings
from planner.tables.optimizer import decay_notes, optimizer_plan
from planner.tables.padded_dims import padded_notes
from planner.tables.parameters import parameter_rows
from planner.tables.reasons import Reasons
from planner.tables.regather import regather_notes
from planner.tables.rows import Diagnostic, StagePlan
from planner.tables.sharded import sharded_notes
from planner.tables.sizes import format_bytes
from planner.tables.tables import Tables
from planner.tables.weight_gradients import weight_gradient_notes


def tables_of(
    spec: Spec,
    lowered: Lowered,
    schedule: SchedulePlan,
    sites: tuple[AttentionSite, ...],
    memory: tuple[MemoryRow, ...],
    regions: tuple[Region, ...] = (),
    slots: tuple[GraphSlots, ...] = (),
    recomputed: tuple[Piece, ...] = (),
    cost: CostPlan | None = None,
    cluster: Cluster | None = None,
    compiled: Compiled | None = None,
) -> Tables:
    """The rows of all decisions. Every parameter, every collective."""
    decisions, shards = lowered.decisions, lowered.shards
    places, reasons = Places(decisions.blocks), Reasons(decisions, sites)
    parameters = parameter_rows(spec, decisions, reasons, places)
    return Tables(
        spec=spec.to_dict(),
        mesh=decisions.mesh,
        parameters=parameters,
        collectives=(*collective_rows(lowered, places, recomputed), *shards.at_step, *weight_rows(lowered, schedule)),
        stages=stage_rows(decisions, shards),
        schedule=schedule,
        optimizer=optimizer_plan(spec.optimizer, shards.buffers, decisions.mesh, decisions.rules),
        experts=experts_rows(decisions, places),
        graph_regions=rows_of(regions),
        graph_slots=slots,
        recompute=recompute_rows(recomputed, decisions, places),
        compiled=() if compiled is None else compiled_rows(compiled, decisions, places),
        memory=memory,
        cost=cost,
        diagnostics=(
            *cluster_warnings(cluster),
            *memory_warnings(memory, cluster),
            *schedule_warnings(schedule),
            *weight_gradient_notes(lowered, schedule),
            *graph_rounding_warnings(spec, lowered),
            *input_warnings(spec, decisions),
            *diagnostic_rows(decisions, parameters, sites, reasons, places),
            *documents_notes(spec, decisions, sites, places),
            *regather_notes(lowered, places),
            *padded_notes(decisions, shards, places),
            *decay_notes(spec.optimizer, parameters, shards.buffers),
            *sharded_notes(spec, lowered, memory, cluster),
        ),
        summary=summary_row(decisions, parameters),
    )


def cluster_warnings(cluster: Cluster | None) -> Iterator[Diagnostic]:
    """Warnings for values of a cluster file that are more often a mistake."""
    for warning in cluster.warnings() if cluster is not None else ():
        yield Diagnostic("warning", warning.what, str(warning.where), warning.fix)


def memory_warnings(memory: tuple[MemoryRow, ...], cluster: Cluster | None) -> Iterator[Diagnostic]:
    """A rank that needs more than its device has to give: the worst of them."""
    worst = max(too_large(memory, cluster), key=lambda row: row.total, default=None)
    if worst is not None and cluster is not None:
        device, part = cluster.device, f"{cluster.device.usable_memory:.0%}"
        yield Diagnostic(
            "warning",
            f"pp rank {worst.pp_rank} needs {format_bytes(worst.total)}, more than the usable "
            f"{format_bytes(usable_bytes(cluster))} of a {device.name} ({part} of its memory)",
            "cluster",
            "raise mesh.tp or mesh.pp, set recompute: full, or lower batch.micro",
        )


def input_warnings(spec: Spec, decisions: Decisions) -> Iterator[Diagnostic]:
    """Integers drawn by the spec beyond the rows or classes of the model: a batch that holds one is refused."""
    for name, given in spec.inputs.items():
        ids = min(decisions.id_ranges.get(name, ()), key=lambda ids: ids.high, default=None)
        if ids is not None and given.high is not None and given.high > ids.high:
            yield Diagnostic(
                "warning",
                f"inputs.{name}.high is {given.high}, but {ids.what} has {ids.unit} 0 to {ids.high - 1}",
                f"inputs.{name}.high",
                f"set high: {ids.high}, or less",
            )


def schedule_warnings(schedule: SchedulePlan) -> Iterator[Diagnostic]:
    """Fewer microbatches than ranks of the pipeline: it runs and is right, but ranks wait more than they must."""
    count, pp = schedule.num_microbatches, len(schedule.orders)
    if count < pp:
        yield Diagnostic(
            "warning",
            f"{count} microbatch{'es do' if count > 1 else ' does'} not fill a pipeline of {pp} ranks, which "
            f"idle for {schedule.bubble_fraction:.0%} of the step (bubble)",
            "batch.global",
            f"use {pp} microbatches or more (batch.global from {pp} · micro · dp), or lower pp",
        )


def stage_rows(decisions: Decisions, shards: Shards) -> tuple[StagePlan, ...]:
    """One row a stage: its blocks, its parameters on one rank, the values that cross its boundaries."""
    return tuple(_stage_row(decisions, shards, index) for index in range(decisions.stages.num_stages))


def _stage_row(decisions: Decisions, shards: Shards, index: int) -> StagePlan:
    program, stages, mesh = decisions.program, decisions.stages, decisions.mesh
    blocks = tuple(decisions.blocks.instances[b].path for b in stages.blocks_of_stage[index])
    held = [program.node(n) for n in program.parameters if index in stages.parameter_stages.get(n, ())]
    count = sum(node.meta["val"].numel() for node in held)
    place = mesh.pp_rank_of(index), mesh.chunk_of(index)
    return StagePlan(index, *place, blocks, count, shards.received(index), shards.sent(index))
