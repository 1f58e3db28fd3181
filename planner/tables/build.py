"""Builds every row of a plan from the decisions. Nothing here decides or rejects anything.

Diagnostics report where a run may surprise you. Only graphs of Transformer Engine round gradients:

    eager, local on a GPU      buffer += gᵀ x             accumulated in the dtype of the buffer
    transformer_engine         buffer += round(gᵀ x)      the graph returns the gradient in the dtype of the weight

Each weight gradient is computed in one of four ways, found in the lowered stages:

    can wait        for its W: a product of a value with the weight and its bias, outside of graph regions
    in graph        the same product inside a region, whose backward graph computes it
    at once         the same product outside, on a value in a graph's static memory: the next microbatch overwrites
                    that value after the backward, so a W would read the wrong one
    by autograd     for every other reader: norms, lookups, products with a weight that was cast or sliced before

A weight that is read in several ways has an entry for each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from passes.base import StageGraph, ops_of
from passes.blocks.blocks import Places, glob_of
from passes.ops.weight_gradients import AtOnce
from passes.own_linears import PRODUCTS
from passes.pieces import homes
from passes.program.ops.aten import packet_of, shape_of
from planner.capture.model.hub_format import HubFormat
from planner.cluster.cluster import Cluster
from planner.compiled.pieces import Compiled
from planner.compiled.pieces import rows_of as compiled_rows
from planner.cost.layout import CostPlan
from planner.cost.memory import MemoryRow
from planner.cost.planned import too_large, usable_bytes
from planner.decisions import Decisions
from planner.exchanges.collectives import collective_rows, weight_rows
from planner.pipeline.schedule import SchedulePlan
from planner.placement.attention import AttentionSite
from planner.recompute.decide import rows_of as recompute_rows
from planner.regions.regions import rows_of
from planner.regions.static_memory import GraphSlots
from planner.sharding.shards import Shards
from planner.spec.fields import AUTO
from planner.spec.spec import Spec
from planner.tables.diagnostics import diagnostic_rows, stored_notes, summary_row
from planner.tables.experts import experts_rows
from planner.tables.op_notes import documents_notes
from planner.tables.parameters import decay_notes, dtype_name, optimizer_plan, parameter_rows, regather_notes
from planner.tables.reasons import Reasons
from planner.tables.sizes import format_bytes
from planner.tables.tables import Diagnostic, StagePlan, Tables, remark, warning
from planner.trace.lowered import Lowered


class Beside(NamedTuple):
    """The decisions that the lowered stages do not contain."""

    schedule: SchedulePlan
    compiled: Compiled
    sites: tuple[AttentionSite, ...]
    slots: tuple[GraphSlots, ...]
    memory: tuple[MemoryRow, ...]
    cost: CostPlan | None


def tables_of(spec: Spec, lowered: Lowered, beside: Beside, cluster: Cluster | None, hub: HubFormat) -> Tables:
    """Return all rows of a plan, with every parameter and every collective."""
    decisions, shards = lowered.decisions, lowered.shards
    schedule, compiled, sites, slots, memory, cost = beside
    places, reasons = Places(decisions.blocks), Reasons(decisions, sites)
    parameters = parameter_rows(spec, decisions, reasons, places)
    return Tables(
        spec=spec.to_dict(),
        mesh=decisions.mesh,
        parameters=parameters,
        collectives=(*collective_rows(lowered, places), *shards.at_step, *weight_rows(lowered, schedule)),
        stages=tuple(_stage_row(decisions, shards, index) for index in range(decisions.stages.num_stages)),
        schedule=schedule,
        optimizer=optimizer_plan(spec.optimizer, shards.buffers, decisions.mesh, decisions.rules),
        experts=tuple(experts_rows(decisions, places)),
        graph_regions=rows_of(lowered.regions),
        graph_slots=slots,
        recompute=recompute_rows(lowered.recomputed, decisions, places),
        compiled=compiled_rows(compiled, decisions, places),
        memory=memory,
        cost=cost,
        diagnostics=(
            *(warning(e.what, str(e.where), e.fix) for e in (cluster.warnings() if cluster is not None else ())),
            *memory_warnings(memory, cluster),
            *schedule_warnings(schedule),
            *weight_gradient_notes(lowered, schedule),
            *graph_rounding_warnings(spec, lowered),
            *compile_notes(spec, decisions),
            *input_warnings(spec, decisions),
            *diagnostic_rows(decisions, parameters, sites, reasons, places),
            *documents_notes(spec, decisions, sites, places),
            *regather_notes(lowered, places),
            *padded_notes(decisions, shards, places),
            *decay_notes(spec.optimizer, parameters, shards.buffers),
            *sharded_notes(spec, lowered, memory, cluster),
            *stored_notes(hub, parameters),
        ),
        summary=summary_row(decisions, parameters),
    )


def memory_warnings(memory: tuple[MemoryRow, ...], cluster: Cluster | None) -> Iterator[Diagnostic]:
    """Yield a warning for the rank that exceeds its device's usable memory the most, if any does."""
    worst = max(too_large(memory, cluster), key=lambda row: row.total, default=None)
    if worst is not None and cluster is not None:
        device, part = cluster.device, f"{cluster.device.usable_memory:.0%}"
        yield warning(
            f"pp rank {worst.pp_rank} needs {format_bytes(worst.total)}, more than the usable "
            f"{format_bytes(usable_bytes(cluster))} of a {device.name} ({part} of its memory)",
            "cluster",
            "raise mesh.tp or mesh.pp, set recompute: full, or lower batch.micro",
        )


def input_warnings(spec: Spec, decisions: Decisions) -> Iterator[Diagnostic]:
    """Yield a warning if random integer inputs exceed the rows or classes of the model: a run rejects such a batch."""
    for name, field in spec.inputs.items():
        ids = min(decisions.id_ranges.get(name, ()), key=lambda ids: ids.high, default=None)
        if ids is not None and field.high is not None and field.high > ids.high:
            yield warning(
                f"inputs.{name}.high is {field.high}, but {ids.what} has {ids.unit} 0 to {ids.high - 1}",
                f"inputs.{name}.high",
                f"set high: {ids.high}, or less",
            )


def schedule_warnings(schedule: SchedulePlan) -> Iterator[Diagnostic]:
    """Yield a warning if there are fewer microbatches than pp ranks: results are right, but ranks idle more."""
    count, pp = schedule.num_microbatches, len(schedule.orders)
    if count < pp:
        yield warning(
            f"{count} microbatch{'es do' if count > 1 else ' does'} not fill a pipeline of {pp} ranks, which "
            f"idle for {schedule.bubble_fraction:.0%} of the step (bubble)",
            "batch.global",
            f"use {pp} microbatches or more (batch.global from {pp} · micro · dp), or lower pp",
        )


def _stage_row(decisions: Decisions, shards: Shards, index: int) -> StagePlan:
    """Return the row of a stage: its blocks, its parameter elements, and the values that it receives and sends."""
    program, stages, mesh = decisions.program, decisions.stages, decisions.mesh
    blocks = tuple(decisions.blocks.instances[b].path for b in stages.blocks_of_stage[index])
    names = [n for n in program.parameters if index in stages.parameter_stages.get(n, ())]
    count = sum(program.node(name).meta["val"].numel() for name in names)
    place = mesh.pp_rank_of(index), mesh.chunk_of(index)
    return StagePlan(index, *place, blocks, count, shards.received(index), shards.sent(index))


def graph_rounding_warnings(spec: Spec, lowered: Lowered) -> Iterator[Diagnostic]:
    """Yield one warning if weights of products in captured regions are less precise than their gradient buffers."""
    if spec.cuda_graphs.impl != "transformer_engine":
        return
    products = {row.name for row in weight_gradients(lowered) if row.how == IN_GRAPH}
    narrow = {
        (p.fqn, buffer.dtype, buffer.gradient_dtype)
        for buffer in lowered.shards.buffers
        for p in buffer.parameters
        if p.fqn in products and buffer.dtype.itemsize < buffer.gradient_dtype.itemsize
    }
    if narrow:
        (_, dtype, of_sum), count = min(narrow, key=str), len({name for name, _, _ in narrow})
        yield warning(
            f"the gradients of {count} weights in graphs are rounded to {dtype_name(dtype)} in each microbatch and "
            f"summed in {dtype_name(of_sum)}: transformer_engine returns them so; on a GPU, eager steps and impl: "
            "local do not round",
            "cuda_graphs.impl",
            "set impl: local, or accept this rounding difference from eager steps",
        )


def compile_notes(spec: Spec, decisions: Decisions) -> Iterator[Diagnostic]:
    """Yield one note if the cluster has GPUs and ``compile: auto`` resolves to off."""
    if spec.compile == AUTO and decisions.on_gpu and not spec.compiles(on_gpu=True):
        what = "compile: auto is off beside cuda_graphs: graphs of compiled pieces have not run on a GPU"
        yield remark(what, "compile", "set compile: true to use both")


def padded_notes(decisions: Decisions, shards: Shards, places: Places) -> Iterator[Diagnostic]:
    """Yield one note per padded dim size, at the first value that is gathered or scattered along such a dim."""
    reported = set[tuple[int, int]]()
    for change in (change for of_stage in shards.changes for change in of_stage):
        cut = change.before if change.before.is_sharded else change.after
        value = decisions.program.node(change.value)
        if not cut.padding or not value.meta.get("grad"):
            continue
        size, local = shape_of(value)[cut.dim], cut.local_size(decisions.placements.size(value))
        if (size, local) not in reported:
            reported.add((size, local))
            yield remark(
                f"dim {cut.dim} = {size} is padded to {size + cut.padding} over {change.axis}: each rank holds "
                f"{local}, and no sum includes padding",
                places.text(value),
            )


def sharded_notes(
    spec: Spec, lowered: Lowered, memory: Sequence[MemoryRow], cluster: Cluster | None
) -> Iterator[Diagnostic]:
    """Yield one note on whether gathered weights are freed after each use, if the plan had to choose."""
    if not any(buffer.gathers for buffer in lowered.shards.buffers) or spec.num_microbatches == 1:
        return
    if spec.optimizer.reshard != AUTO:
        return
    at, once = "optimizer.reshard", "gathered once a step and whole until its end"
    if cluster is None:
        what = "weights are freed after each use: without a cluster the plan does not know whether they fit"
        yield remark(what, at, f"set reshard: false for weights that are {once}, or name a cluster")
    elif lowered.shards.reshards:
        yield remark(f"weights are freed after each use: {once}, they do not fit", at)
    else:
        most, usable = max(row.total for row in memory), usable_bytes(cluster)
        what = f"weights are {once}: the fullest rank needs {format_bytes(most)} of {format_bytes(usable)}"
        yield remark(what, at, "set reshard: true to free them after each use")


WHERE = "pipeline.schedule"


def weight_gradient_notes(lowered: Lowered, schedule: SchedulePlan) -> Iterator[Diagnostic]:
    """Yield, if the schedule has W, a note on the weight gradients that wait, and one per reason why others do not."""
    if not schedule.has_weights:
        return
    rows = weight_gradients(lowered)
    waiting = {row.name for row in rows if row.how == CAN_WAIT}
    yield remark(f"gradients of {len(waiting)} parameters wait for W: those of matrix products", WHERE)
    others: dict[str, list[str]] = {}
    for row in rows:
        if row.how != CAN_WAIT:
            others.setdefault(row.reason, []).append(glob_of(row.name))
    for reason, names in others.items():
        yield remark(f"computed with the backward, {reason}: {', '.join(dict.fromkeys(names))}", WHERE)


CAN_WAIT, IN_GRAPH, AT_ONCE, BY_AUTOGRAD = "can wait", "in graph", "at once", "by autograd"


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """How the gradient of parameter ``name`` is computed: one of the four ways; ``reason``: why it does not wait."""

    name: str
    how: str
    reason: str = ""


def weight_gradients(lowered: Lowered) -> tuple[WeightGradient, ...]:
    """Return how the gradient of each trained parameter is computed, in the order of the program."""
    decisions, home = lowered.decisions, homes(lowered.regions)
    rows: dict[str, dict[WeightGradient, None]] = {}
    for stage in map(lowered.stage, range(lowered.num_stages)):
        for node in stage.graph.find_nodes(op="get_attr"):
            name = decisions.program.parameters.get(node.meta.get("origin", ""))
            if name is not None and node.meta["grad"]:
                rows.setdefault(name, {}).update(dict.fromkeys(_ways(decisions, stage, node, name, home)))
    return tuple(row for name in decisions.program.parameters.values() for row in rows.get(name, ()))


def _ways(
    decisions: Decisions, stage: StageGraph, parameter: fx.Node, name: str, home: frozenset[str]
) -> Iterator[WeightGradient]:
    for reader in parameter.users:
        names = ops_of(reader) or reader.meta["change"].readers
        target = packet_of(decisions.program.node(names[0]).target) if names[0] not in ("send", "loss") else names[0]
        if reader.target not in PRODUCTS:
            yield WeightGradient(name, BY_AUTOGRAD, f"as {target} reads it")
        elif not reader.all_input_nodes[0].meta.get("grad"):
            yield WeightGradient(name, BY_AUTOGRAD, f"as {target} multiplies a value without a gradient")
        elif not home.isdisjoint(names):
            yield WeightGradient(name, IN_GRAPH, "in CUDA graphs")
        elif isinstance(getattr(stage.root, str(reader.args[-1].target)), AtOnce):  # pyright: ignore
            why = "because they read memory of a CUDA graph that the next microbatch reuses"
            yield WeightGradient(name, AT_ONCE, why)
        else:
            yield WeightGradient(name, CAN_WAIT)
