"""Rows of all parameters, frozen and unused ones too: style, sharded dim, and the reason in words.

Also the rows of the gradient buffers, and notes on weight decay of vectors and on regathered values.

Regather: under sequence parallelism, the input of a column-parallel linear is gathered, and its weight gradient needs
the gathered value again. Saving it takes tp times the bytes of a rank's shard. Gathering it again, while the gradient
of the value is computed, saves only the shard (Korthikanti et al. 2022, section 4.2). One op gathers and multiplies,
so a value that linears in two graph regions read is saved.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod

import torch
from torch import fx

from passes.blocks.blocks import Places
from passes.ops.collectives import gather
from passes.ops.linear import gathered_linears
from passes.parameters import axis_of
from passes.partition.type_changes import TypeChange
from planner.decisions import Decisions
from planner.mesh import Mesh
from planner.sharding.buffers import BucketPlan, Buffer, BufferPlan, OptimizerPlan
from planner.sharding.homes import MatrixHomes, homes_of
from planner.sharding.parameters import ParameterPlan, part_of_node
from planner.spec.optimizer import OptimizerSpec
from planner.spec.spec import Spec
from planner.tables.reasons import Reasons
from planner.tables.sizes import format_bytes
from planner.tables.tables import Diagnostic, remark
from planner.trace.lowered import Lowered
from planner.updates import UpdateRules, aliases_of, base_of, settings_of


def parameter_rows(spec: Spec, decisions: Decisions, reasons: Reasons, places: Places) -> tuple[ParameterPlan, ...]:
    """Return one row for every parameter, in the order of the model."""
    aliases = aliases_of(decisions.program)
    styles: dict[object, tuple[str, str]] = {}
    first_place = decisions.mesh.place(0)
    rows = []
    for name, fqn in decisions.program.parameters.items():
        node = decisions.program.node(name)
        part = part_of_node(decisions, node, first_place)
        # copies of a block share the reason of the first one; parameters shared by blocks have their own
        key = (decisions.blocks.representative.get(name, name), part)
        if key not in styles:
            styles[key] = reasons.style_and_reason(node)
        style, reason = styles[key]
        rows.append(
            ParameterPlan.of(
                part,
                name=fqn,
                shape=tuple(node.meta["val"].shape),
                dtype=str(node.meta["val"].dtype).removeprefix("torch."),
                style=style,
                reason=reason,
                stages=decisions.stages.parameter_stages.get(name, ()) or (0,),
                aliases=aliases.get(fqn, ()),
                origin=origin_of(spec, decisions, node),
                where=places.text(node) if node.users else "",
                matrices=decisions.rules.matrices.get(fqn),
            )
        )
    base, own = base_of(spec.optimizer), settings_of(spec.optimizer, rows)
    return tuple(replace(row, group=own[row.name].told(base)) if row.name in own else row for row in rows)


def origin_of(spec: Spec, decisions: Decisions, node: fx.Node) -> str:
    """Return the spec line of the override that decided; "solver" if there was a choice; else "default"."""
    origin = decisions.placements.origins[node.name]
    if origin.startswith("override "):
        return str(spec.location(f"tensor_parallel.overrides.{origin.removeprefix('override ')}"))
    axis = axis_of(decisions.expert_parts.get(node.name))
    return origin if decisions.mesh.size(axis) > 1 and node.users else "default"


def optimizer_plan(
    optimizer: OptimizerSpec, buffers: tuple[Buffer, ...], mesh: Mesh, rules: UpdateRules
) -> OptimizerPlan:
    """Return the plan of the optimizer, with one row per gradient buffer of each pp rank."""
    rows = tuple(_buffer_row(buffer, homes_of(buffer, mesh, rules)) for buffer in buffers)
    return OptimizerPlan(rows, optimizer.name, optimizer.planned_zero, optimizer.alignment)


def decay_notes(
    optimizer: OptimizerSpec, parameters: tuple[ParameterPlan, ...], buffers: Iterable[Buffer]
) -> Iterator[Diagnostic]:
    """Yield one note if norms and biases have weight decay, which most recipes exclude."""
    base, own = base_of(optimizer), settings_of(optimizer, parameters)
    trained = {slot.name for b in buffers if not b.is_frozen for bucket in b.layout.buckets for slot in bucket.slots}
    vectors = [row.name for row in parameters if len(row.shape) < 2 and row.name in trained]
    decayed = [name for name in vectors if own.get(name, base).weight_decay]
    if decayed:
        yield remark(
            f"norms and biases are decayed: {len(decayed)} parameters with fewer than two dims, such as {decayed[0]}",
            "optimizer.no_decay",
            "set optimizer.no_decay: vectors to leave them out",
        )


def _buffer_row(buffer: Buffer, homes: MatrixHomes | None) -> BufferPlan:
    of_buckets = [()] * len(buffer.layout.buckets) if homes is None else homes.buckets
    return BufferPlan(
        buffer.pp_rank,
        dtype_name(buffer.dtype),
        dtype_name(buffer.gradient_dtype),
        buffer.layout.num_elements,
        buffer.layout.shard_elements(),
        tuple(
            BucketPlan(b.world.start, b.world.stop, tuple(slot.name for slot in b.slots), tuple(h.home for h in homed))
            for b, homed in zip(buffer.layout.buckets, of_buckets, strict=True)
        ),
        buffer.reduced_over,
        buffer.rule,
        "" if homes is None else homes.axis,
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def regather_notes(lowered: Lowered, places: Places) -> Iterator[Diagnostic]:
    """Yield one note for each stage that regathers values, and one for each gathered value that is saved instead."""
    decisions = lowered.decisions
    if not decisions.lowering.options.regather:
        return
    stages = [list(gathered_values(lowered, stage)) for stage in range(lowered.num_stages)]
    is_any = any(again for values in stages for _, again in values)
    for stage, values in enumerate(stages if is_any else ()):
        sizes = [_bytes(decisions, change) for change, again in values if again]
        whole, tp = sum(sizes), decisions.mesh.tp
        if sizes:
            yield remark(
                f"stage {stage} gathers the inputs of {len(sizes)} groups of linears again in the backward: per "
                f"microbatch, {format_bytes(whole * (tp - 1) // tp)} are not saved and {format_bytes(whole)} "
                "gathered again",
                "tensor_parallel.regather",
            )
        for change in (change for change, again in values if not again):
            yield remark(
                f"a gathered value of {format_bytes(_bytes(decisions, change))} is saved for the backward: "
                "ops other than products with trained weights read it, or CUDA graphs separate them",
                places.text(decisions.program.node(change.value)),
            )


def gathered_values(lowered: Lowered, stage: int) -> Iterator[tuple[TypeChange, bool]]:
    """Yield (type change, whether the backward regathers) for each value that is gathered over tp in the forward."""
    for node in lowered.stage(stage).graph.nodes:
        if node.target in (gather, gathered_linears):
            change: TypeChange = node.meta["change"]
            if change.axis == "tp" and change.how.backward:
                yield change, node.target is gathered_linears and bool(node.args[3])


def _bytes(decisions: Decisions, change: TypeChange) -> int:
    value, cut = decisions.program.node(change.value).meta["val"], change.before
    return prod(n + cut.padding * (d == cut.dim) for d, n in enumerate(value.shape)) * value.element_size()
