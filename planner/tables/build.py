"""Build every row of a plan from the decisions. Nothing is decided here, and nothing refused.

Notes beside the rows say what a run does otherwise than one would think: gradients that graphs of Transformer Engine
round, dims that tp does not divide, weights in shards that stay whole, documents, weight gradients that no W computes.

    eager, local on a GPU      buffer += gᵀ x             added as it is computed, in the dtype of the buffer
    transformer_engine         buffer += round(gᵀ x)      its graph gives the gradient in the dtype of the weight

Its own way past that (fuse_wgrad_accumulation, into ``main_grad``) is one of its layers, and regions hold none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from passes.blocks.places import Places, glob_of
from passes.pieces import Piece
from passes.program.ops.aten import shape_of
from passes.regions import Region
from planner.capture.model.hub_format import HubFormat
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
from planner.regions.weight_gradients import BY_AUTOGRAD, CAN_WAIT, IN_GRAPH, WeightGradient, weight_gradients
from planner.saved.lowered import Lowered
from planner.sharding.shards import Shards
from planner.spec.fields import AUTO
from planner.spec.spec import Spec
from planner.tables.diagnostics import diagnostic_rows, stored_notes, summary_row
from planner.tables.experts import experts_rows
from planner.tables.parameters import decay_notes, optimizer_plan, parameter_rows, regather_notes
from planner.tables.reasons import Reasons
from planner.tables.rows import Diagnostic, StagePlan
from planner.tables.sizes import format_bytes
from planner.tables.tables import Tables


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
    hub: HubFormat | None = None,
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
            *compile_notes(spec, decisions),
            *input_warnings(spec, decisions),
            *diagnostic_rows(decisions, parameters, sites, reasons, places),
            *documents_notes(spec, decisions, sites, places),
            *regather_notes(lowered, places),
            *padded_notes(decisions, shards, places),
            *decay_notes(spec.optimizer, parameters, shards.buffers),
            *sharded_notes(spec, lowered, memory, cluster),
            *(() if hub is None else stored_notes(hub, parameters)),
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


# ---- notes on attention that keeps the documents of a packed sequence apart


def documents_notes(
    spec: Spec, decisions: Decisions, sites: tuple[AttentionSite, ...], places: Places
) -> Iterator[Diagnostic]:
    """Which attentions compute the pairs of tokens within documents alone, and which all pairs of a sequence."""
    documents, program = decisions.lowering.documents, decisions.program
    if spec.data.packing != "documents":
        return
    within = [n for n in program.graph.graph.nodes if n.name in documents.attentions]
    if within:
        length = shape_of(within[0])[2] * decisions.mesh.cp
        share = f"{documents.mean / length:.0%} of the pairs of a sequence of {length}"
        how = f"for documents of {documents.mean} tokens" if documents.mean < length else "unless documents are shorter"
        fix = "" if documents.mean < length else "set data.mean_document for the predicted memory and time"
        what = f"{len(within)} attentions run within documents: {share}, {how}"
        yield Diagnostic("info", what, places.text(within[0]), fix)
    others = [site.node for site in sites if not any(n.name in documents.attentions for n in site.nodes)]
    if others:
        why = "" if spec.cuda_graphs.impl == "none" else ", as CUDA graphs hold the blocks of no document"
        what = (
            f"{len(others)} kinds of attention compute all pairs of a sequence and mask those of other documents{why}"
        )
        fix = "" if why else "use torch.nn.functional.scaled_dot_product_attention with a mask and without dropout"
        yield Diagnostic("info", what, places.text(others[0]), fix)


# ---- warns if graphs of Transformer Engine round gradients that a run without graphs does not round


def graph_rounding_warnings(spec: Spec, lowered: Lowered) -> Iterator[Diagnostic]:
    """One row if weights of products in captured regions are less precise than their gradient buffers."""
    if spec.cuda_graphs.impl != "transformer_engine":
        return
    products = {found.name for found in weight_gradients(lowered) if found.how == IN_GRAPH}
    narrow = {
        (p.fqn, buffer.dtype, buffer.gradient_dtype)
        for buffer in lowered.shards.buffers
        for p in buffer.parameters
        if p.fqn in products and buffer.dtype.itemsize < buffer.gradient_dtype.itemsize
    }
    if narrow:
        (_, dtype, of_sum), count = min(narrow, key=str), len({name for name, _, _ in narrow})
        yield Diagnostic(
            "warning",
            f"the gradients of {count} weights in graphs are rounded to {_name(dtype)} in each microbatch and "
            f"summed in {_name(of_sum)}: transformer_engine returns them so; on a GPU, eager steps and impl: "
            "local do not round",
            "cuda_graphs.impl",
            "set impl: local, or accept this rounding difference from eager steps",
        )


def compile_notes(spec: Spec, decisions: Decisions) -> Iterator[Diagnostic]:
    """One row if the cluster has GPUs and ``compile: auto`` is off."""
    if spec.compile == AUTO and decisions.on_gpu and not spec.compiles(on_gpu=True):
        what = "compile: auto is off beside cuda_graphs: graphs of compiled pieces have not run on a GPU"
        yield Diagnostic("info", what, "compile", "set compile: true to use both")


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


# ---- dims of activations that tp does not divide, as a sequence of 17 tokens: ranks hold equal parts of a padded one


def padded_notes(decisions: Decisions, shards: Shards, places: Places) -> Iterator[Diagnostic]:
    """One note for each size, at the first value that is gathered or scattered along it."""
    told = set[tuple[int, int]]()
    for change in (change for of_stage in shards.changes for change in of_stage):
        cut = change.before if change.before.is_sharded else change.after
        value = decisions.program.node(change.value)
        if not cut.padding or not value.meta.get("grad"):
            continue
        size, held = shape_of(value)[cut.dim], cut.local_size(decisions.placements.size(value))
        if (size, held) not in told:
            told.add((size, held))
            yield Diagnostic(
                "info",
                f"dim {cut.dim} = {size} is padded to {size + cut.padding} over {change.axis}: each rank holds "
                f"{held}, and no sum includes padding",
                places.text(value),
            )


# ---- a note on weights in shards: when they are freed, and why


def sharded_notes(
    spec: Spec, lowered: Lowered, memory: Sequence[MemoryRow], cluster: Cluster | None
) -> Iterator[Diagnostic]:
    """One, if the plan chose with several microbatches."""
    if not any(buffer.gathers for buffer in lowered.shards.buffers) or spec.num_microbatches == 1:
        return
    if spec.optimizer.reshard != AUTO:
        return
    at, once = "optimizer.reshard", "gathered once a step and whole until its end"
    if cluster is None:
        what = "weights are freed after each use: without a cluster the plan does not know whether they fit"
        yield Diagnostic("info", what, at, f"set reshard: false for weights that are {once}, or name a cluster")
    elif lowered.shards.reshards:
        yield Diagnostic("info", f"weights are freed after each use: {once}, they do not fit", at)
    else:
        most, usable = max(row.total for row in memory), usable_bytes(cluster)
        what = f"weights are {once}: the fullest rank needs {format_bytes(most)} of {format_bytes(usable)}"
        yield Diagnostic("info", what, at, "set reshard: true to free them after each use")


# ---- which gradients of weights a W of the schedule makes, and which come with their backward, and why


WHERE = "pipeline.schedule"


def weight_gradient_notes(lowered: Lowered, schedule: SchedulePlan) -> Iterator[Diagnostic]:
    """If the schedule has W: one note of the weight gradients that wait, and one for each reason why others do not."""
    if not schedule.has_weights:
        return
    rows = weight_gradients(lowered)
    waiting = {row.name for row in rows if row.how == CAN_WAIT}
    yield Diagnostic("info", f"gradients of {len(waiting)} parameters wait for W: those of matrix products", WHERE)
    others: dict[str, list[str]] = {}
    for row in rows:
        if row.how != CAN_WAIT:
            others.setdefault(_reason(row), []).append(glob_of(row.name))
    for reason, names in others.items():
        yield Diagnostic("info", f"computed with the backward, {reason}: {', '.join(dict.fromkeys(names))}", WHERE)


def _reason(row: WeightGradient) -> str:
    if row.how == BY_AUTOGRAD:
        return f"as {row.reason}"
    return (
        "in CUDA graphs"
        if row.how == IN_GRAPH
        else "because they read memory of a CUDA graph that the next microbatch reuses"
    )
