"""Lower a plan for one rank: the captured graph becomes the rank's stage modules, by the passes of passes/lower.py."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx, nn

from passes.base import LowerContext, Pass, RankProgram, StageModule
from passes.errors import PlanError
from passes.keep_rows import KEPT
from passes.loss_head import WANTED
from passes.lower import ONE_ROW, PASSES, Differences, extract, finish, run_passes, with_head
from passes.ops.counts import GlobalSums
from passes.ops.kept_rows import KeptRows
from passes.ops.loss_head import ROW, Wanted
from passes.partition.sequence.versions import OneRow, one_row
from passes.peephole import place
from passes.program.ops.aten import shape_of
from passes.program.program import BoundaryPlan, Program
from planner.capture.model.meta_init import buffer_value
from planner.decisions import Decisions
from planner.exchanges.collectives import check_scored
from planner.frozen_plan import Plan
from planner.sharding.buffers import homes_of_ops
from planner.sharding.parameters import local_parameter
from planner.trace.lowered import context_at


def lower(plan: Plan, rank: int, device: torch.device | str = "cpu", *, thorough: bool = False) -> RankProgram:
    """Return the program of ``rank``, with parameters and buffers on meta for the runtime to fill.

    ``thorough``: run the slow checks too. Raises PassError if a pass breaks an invariant.
    """
    context, indices = context_of(plan, rank, torch.device(device), thorough=thorough)
    return _rank_program(plan, context, indices)


def lower_again(plan: Plan, rank: int, first: RankProgram, of: Plan, device: torch.device | str = "cpu") -> RankProgram:
    """Return the program of ``rank`` for another length, which shares the handles of ``first``, its program of the plan
    ``of``. Parameters and buffers are on meta, for the runtime to replace by those of ``first``."""
    context, indices = context_of(plan, rank, torch.device(device), thorough=False)
    shared = _with_handles(context, first)
    sums = None if context.sums is None else GlobalSums(shared.data, context.sums.num_microbatches)
    return _rank_program(plan, replace(shared, load=context.load, sums=sums), indices, _counted_by(first, of))


def _counted_by(first: RankProgram, plan: Plan) -> dict[str, torch.Tensor]:
    """Return the model's buffers, by name, from the graph of counts, as the model itself may have been released."""
    if first.count_module is None:
        return {}
    held, buffers = dict(first.count_module.named_buffers()), plan.to_run()[0].program.buffers
    return {buffers[name]: value for name, value in held.items() if name in buffers}


def _rank_program(
    plan: Plan, context: LowerContext, indices: tuple[int, ...], counted: Mapping[str, torch.Tensor] | None = None
) -> RankProgram:
    decisions, _ = plan.to_run()
    modules = [_stage(plan, context, index, chunk) for chunk, index in enumerate(indices)]
    counts = decisions.terms.counts
    if counts is not None:
        counts = _with_constants(plan, counts, counted or {})
        place(counts.graph, context.device)
        counts.recompile()
    inputs = tuple(decisions.program.inputs[n] for n in decisions.terms.count_inputs if n in decisions.program.inputs)
    return RankProgram(
        modules,
        {"tp": context.tp, context.data.name: context.data, **context.axes},
        context.random,
        count_module=counts,
        count_inputs=inputs,
        count_levels=decisions.terms.levels,
        gate=context.gate,
        load=context.load,
        sums=context.sums,
        weight_gradients=context.weight_gradients,
    )


def context_of(plan: Plan, rank: int, device: torch.device, *, thorough: bool) -> tuple[LowerContext, tuple[int, ...]]:
    """Return the context of the passes for ``rank``, and the indices of its stages, chunk by chunk."""
    decisions, shards = plan.to_run()
    here = plan.mesh.place(rank)
    context = context_at(
        decisions,
        shards,
        here,
        device,
        regions=plan.regions,
        recomputed=plan.recomputed,
        pieces=plan.pieces,
        thorough=thorough,
        buckets=shards.bucket_of(here),
        homes=homes_of_ops(decisions) if any(b.gathers for b in shards.buffers) else {},
        load=decisions.load(),
    )
    return context, plan.mesh.stages_of(here["pp"])


def _stage(
    plan: Plan, context: LowerContext, index: int, chunk: int, passes: tuple[Pass, ...] | None = None
) -> StageModule:
    """Return one stage, lowered by ``passes`` (default: all)."""
    decisions, shards = plan.to_run()
    borders = shards.received(index), shards.sent(index)
    if context.one_row is not None and passes is ONE_ROW:
        received, sent = (at_one_position(decisions.program, context.one_row, border) for border in borders)
        borders = received, sent
    stage = extract(context, index)
    run_passes(stage, context, passes)
    return finish(
        context,
        stage,
        chunk,
        lambda name: local_parameter(decisions, decisions.program.node(name), index, context.place),
        borders,
    )


def lower_with_head(
    plan: Plan, rank: int, program: RankProgram, device: torch.device | str = "cpu", *, want: str
) -> StageModule | None:
    """Return the stage of the loss with a further result ``want`` (passes.ops.loss_head); None if ``rank`` lacks it.

    The result is the scores of labels, or the logits of one position of each sequence; or log-probabilities instead of
    the loss, for training with a loss outside the model. The stage shares the handles of ``program``, the training
    program of ``rank``; parameters and buffers are on meta. Raises PlanError, on every rank, if the loss looks up no
    probability of a label.
    """
    check_scored(plan.to_run()[0])
    trained = next((stage for stage in program.stages if stage.has_loss), None)
    if trained is None:
        return None
    context = _context_again(plan, rank, program, device)
    return _stage(plan, context, trained.index, trained.chunk, with_head(PASSES, want))


def lower_kept_rows(
    plan: Plan, rank: int, program: RankProgram, device: torch.device | str = "cpu"
) -> tuple[list[StageModule], list[StageModule], float]:
    """Return the stages of ``rank`` that keep keys and values of all positions, those that compute one position from
    them, and the eps of the least precise dtype of the logits.

    The stages share handles as in ``lower_with_head``. Raises PlanError, with the op and its line, if one position
    needs more than the kept rows; other ranks may not raise it.
    """
    decisions, _ = plan.to_run()
    check_scored(decisions)
    rows = one_row_of(decisions)
    context = replace(_context_again(plan, rank, program, device), one_row=rows)
    keeping, alone = [], []
    for stage in program.stages:
        passes = with_head(PASSES, ROW if stage.has_loss else "", keeps=True)
        keeping.append(_stage(plan, context, stage.index, stage.chunk, passes))
        alone.append(_stage(plan, context, stage.index, stage.chunk, ONE_ROW))
    return keeping, alone, rows.precision


def _context_again(plan: Plan, rank: int, program: RankProgram, device: torch.device | str) -> LowerContext:
    context, _ = context_of(plan, rank, torch.device(device), thorough=False)
    return replace(_with_handles(context, program), load=program.load or context.load, sums=program.sums)


def _with_handles(context: LowerContext, program: RankProgram) -> LowerContext:
    handles = {"tp": program.axes["tp"], "data": program.axes[context.data.name], "random": program.random}
    handles |= {"gate": program.gate or context.gate, "weight_gradients": program.weight_gradients}
    return replace(context, **handles, axes={name: program.axes[name] for name in context.axes})


def check_stages(plan: Plan) -> None:
    """Lower every stage for one tp rank, with the slow checks. Raises PassError if a pass breaks an invariant."""
    for pp in range(plan.mesh.pp):
        context, indices = context_of(plan, plan.mesh.rank_of(pp=pp), torch.device("cpu"), thorough=True)
        for index in indices:
            run_passes(extract(context, index), context, PASSES)


def passes_text(plan: Plan, rank: int, *, full: bool = False) -> str:
    """Return the changes of every pass to every stage of ``rank``, as text. ``full``: show repeated blocks too.

    Needs no process group. Raises PlanError for an unknown rank.
    """
    world_size = plan.mesh.world_size
    if not 0 <= rank < world_size:
        known = f"from 0 to {world_size - 1}" if world_size > 1 else "0"
        raise PlanError(
            f"there is no rank {rank}: the mesh has {world_size}", where="--rank", fix=f"give a rank {known}"
        )
    context, indices = context_of(plan, rank, torch.device("cpu"), thorough=True)
    representative = {} if full else plan.to_run()[0].blocks.representative
    lines = []
    for index in indices:
        lines.append(f"stage {index} of rank {rank}")
        differences = Differences(representative)
        stage = extract(context, index)
        differences.seen("extract", stage)
        run_passes(stage, context, PASSES, differences.seen)
        lines += differences.lines
    return "\n".join(lines)


def _with_constants(plan: Plan, module: fx.GraphModule, known: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    """Return the graph of counts with its inputs beside the batch as attributes: lifted constants, and buffers of the
    model (such as class weights). ``known``: values to use instead of the model's, by name.
    """
    root, graph, program, env = nn.Module(), fx.Graph(), plan.to_run()[0].program, dict[fx.Node, Any]()
    for node in module.graph.nodes:
        if node.op != "placeholder" or node.name not in {*program.constants, *program.buffers}:
            env[node] = graph.node_copy(node, lambda n: env[n])
            continue
        env[node] = graph.create_node("get_attr", node.name)
        fqn = program.buffers.get(node.name, "")
        if node.name in program.constants:
            value = program.constants[node.name].detach().clone()
        elif fqn in known:
            value = known[fqn]
        else:
            assert plan.model is not None, "the model was released before its buffers were read"
            value = buffer_value(plan.model, fqn).detach().to(program.node(node.name).meta["val"].dtype, copy=True)
        root.register_buffer(node.name, value)
    return fx.GraphModule(root, graph)


FIX = "nothing: every token runs the whole forward"


def one_row_of(decisions: Decisions) -> OneRow:
    """Return how one position is computed from kept rows. Raises PlanError, with op and line, if it needs more."""
    mesh = decisions.mesh
    if mesh.cp > 1:
        raise PlanError("the sequence is sharded over cp", where="mesh.cp", fix=FIX)
    if mesh.has_expert_axes:
        raise PlanError("rows of experts go to other ranks, over ep or etp", where="mesh.ep", fix=FIX)
    if decisions.lowering.documents.attentions:
        raise PlanError("attention is within documents", where="packing", fix=FIX)
    return one_row(decisions.program, decisions.scored)


def at_one_position(program: Program, rows: OneRow, borders: Iterable[BoundaryPlan]) -> tuple[BoundaryPlan, ...]:
    """Return the values at ``borders`` that the logits need, with the shapes of one position."""
    needed = []
    for border in borders:
        node = program.node(border.name)
        if node not in rows.needed:
            continue
        shape, size = _at_one(rows, border.shape, node), prod(border.shape)
        needed.append(replace(border, shape=shape, bytes=border.bytes * prod(shape) // size if size else 0))
    return tuple(needed)


def _at_one(rows: OneRow, shape: tuple[int, ...], node: fx.Node) -> tuple[int, ...]:
    cut = rows.types.of(node)
    whole = shape_of(node)
    return tuple(whole[d] // rows.length if cut.is_sharded and d == cut.dim else n for d, n in enumerate(shape))


# ---- the forward of one position: not part of a plan; ``Engine.generate`` runs it once for each position


def kept_bytes(plan: Plan) -> tuple[int, ...]:
    """Return the bytes of keys and values that one rank of each pp rank keeps while ``Engine.generate`` runs.

    Raises PlanError, with the op and its line, if they cannot be kept.
    """
    return tuple(kept.num_bytes * plan.schedule.num_microbatches for kept, _ in one_position(plan))


def one_position(plan: Plan) -> Iterator[tuple[KeptRows, RankProgram]]:
    """Yield the kept rows of a microbatch and the program of each pp rank; the axes of the program have counted the
    messages of one position.
    """
    decisions, _ = plan.to_run()
    for pp in range(plan.mesh.pp):
        rank = plan.mesh.rank_of(pp=pp)
        program = lower(plan, rank, "meta")
        keeping, alone, _ = lower_kept_rows(plan, rank, program, "meta")
        program.random.training = False  # no dropout, so no random numbers
        kept = KeptRows(program.random)
        for stages in (keeping, alone):
            for axis in program.axes.values():
                axis.counts.clear()
                axis.bytes.clear()
            for stage in stages:
                setattr(stage.module, KEPT, kept)
                stage.module(*_inputs(stage, decisions))
        yield kept, program


def _inputs(stage: StageModule, decisions: Decisions) -> list[torch.Tensor]:
    """Return meta tensors with the shapes and dtypes of a microbatch, as inputs of ``stage``."""
    program = decisions.program
    if hasattr(stage.module, WANTED):
        wanted: Wanted = getattr(stage.module, WANTED)
        (labels,) = (n for n, key in program.inputs.items() if key == decisions.scored.key)
        wanted.places = torch.empty(1, len(program.node(labels).meta["val"]), dtype=torch.int64, device="meta")
    received = [torch.empty(b.shape, dtype=getattr(torch, b.dtype), device="meta") for b in stage.receives]
    of_keys = {key: program.node(name).meta["val"] for name, key in program.inputs.items()}
    read = [torch.empty_like(of_keys[key], device="meta") for key in stage.inputs]
    return received + read + [torch.empty((), dtype=torch.float64, device="meta") for _ in stage.denominators]
