"""Lower a plan for one rank: captured graph → this rank's stage modules, by the passes of passes/lower.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from passes.base import LowerContext, Pass
from passes.difference import Differences
from passes.errors import PlanError
from passes.extract import extract
from passes.lower import (
    KEEPING,
    KEEPING_NEXT_ROWS,
    LOG_PROBS,
    NEXT_ROWS,
    ONE_ROW,
    PASSES,
    SCORING,
    lower_stage,
    lower_stage_again,
    run_passes,
)
from passes.ops.global_sums import GlobalSums
from passes.ops.load import ExpertLoad
from passes.parameters import LocalParameter
from passes.peephole import place
from passes.program.program import Program
from passes.stage_module import RankProgram, StageModule
from planner.capture.model.meta_init import buffer_value
from planner.decisions import Decisions
from planner.exchanges.one_row import at_one_position, one_row_of
from planner.exchanges.scores import check_scored
from planner.frozen_plan import Plan
from planner.saved.lowered import context_at
from planner.sharding.parameters import local_parameter
from planner.sharding.visits import homes_of_ops


def lower(plan: Plan, rank: int, device: torch.device | str = "cpu", *, thorough: bool = False) -> RankProgram:
    """All that ``rank`` runs, with parameters and buffers on meta for the runtime to fill.

    ``thorough``: run the slow checks too. Raises PassError if a pass did not leave a fact that it must.
    """
    context, indices = context_of(plan, rank, torch.device(device), thorough=thorough)
    return _rank_program(plan, context, indices)


def lower_again(plan: Plan, rank: int, first: RankProgram, of: Plan, device: torch.device | str = "cpu") -> RankProgram:
    """``plan`` for ``rank``, with the handles of ``first``: the program of another length's plan ``of``, which has the
    same weights. Parameters and buffers are on meta, for those of ``first`` to take their place."""
    context, indices = context_of(plan, rank, torch.device(device), thorough=False)
    handles = {"tp": first.axes["tp"], "data": first.axes[context.data.name], "random": first.random}
    handles |= {"gate": first.gate or context.gate, "weight_gradients": first.weight_gradients}
    sums = None if context.sums is None else GlobalSums(handles["data"], context.sums.num_microbatches)
    axes = {name: first.axes[name] for name in context.axes}
    return _rank_program(plan, replace(context, **handles, axes=axes, sums=sums), indices, _counted_by(first, of))


def _counted_by(first: RankProgram, plan: Plan) -> dict[str, torch.Tensor]:
    """The buffers of the model, by name, that a graph of counts holds: the model itself may be gone."""
    if first.count_module is None:
        return {}
    held, buffers = dict(first.count_module.named_buffers()), plan.to_run()[0].program.buffers
    return {buffers[name]: value for name, value in held.items() if name in buffers}


def _rank_program(
    plan: Plan, context: LowerContext, indices: tuple[int, ...], counted: Mapping[str, torch.Tensor] | None = None
) -> RankProgram:
    decisions, shards = plan.to_run()
    modules = []
    for chunk, index in enumerate(indices):
        borders = shards.received(index), shards.sent(index)
        modules.append(lower_stage(context, index, chunk, _local(decisions, context, index), borders))
    counts = decisions.terms.counts
    if counts is not None:
        root = _constants_of(plan, counts, counted or {})
        counts = fx.GraphModule(root, _with_constants(decisions.program, counts))
        place(counts.graph, context.device)
        counts.recompile()
    inputs = tuple(decisions.program.inputs[n] for n in decisions.terms.count_inputs if n in decisions.program.inputs)
    return RankProgram(
        modules,
        {"tp": context.tp, context.data.name: context.data, **context.axes},
        context.random,
        counts,
        inputs,
        context.gate,
        load=context.load,
        sums=context.sums,
        weight_gradients=context.weight_gradients,
    )


def context_of(plan: Plan, rank: int, device: torch.device, *, thorough: bool) -> tuple[LowerContext, tuple[int, ...]]:
    """The context of the passes for ``rank``, and the indices of its stages, chunk by chunk."""
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
        load=ExpertLoad(decisions.noted_experts, decisions.noted_limits, decisions.num_asked),
    )
    return context, plan.mesh.stages_of(here["pp"])


def _local(decisions: Decisions, context: LowerContext, stage: int) -> Callable[[str], LocalParameter]:
    return lambda name: local_parameter(decisions, decisions.program.node(name), stage, context.place)


def lower_next_rows(
    plan: Plan, rank: int, program: RankProgram, device: torch.device | str = "cpu"
) -> StageModule | None:
    """The stage of the loss as it returns the logits of one position of each sequence too; as ``lower_scoring``."""
    return lower_scoring(plan, rank, program, device, NEXT_ROWS)


def lower_scoring(
    plan: Plan,
    rank: int,
    program: RankProgram,
    device: torch.device | str = "cpu",
    passes: tuple[Pass, ...] = SCORING,
) -> StageModule | None:
    """The stage of the loss as it returns scores of labels too; None on a rank that does not run it.

    It shares the handles of ``program``, the training program of ``rank``; parameters and buffers are on meta. Raises
    PlanError, on every rank, if the loss gives no label a probability.
    """
    return _loss_stage_again(plan, rank, program, device, passes)


def lower_for_loss_outside(
    plan: Plan, rank: int, program: RankProgram, device: torch.device | str = "cpu"
) -> StageModule | None:
    """The stage of the loss for training with a loss outside the model: it returns log-probabilities of labels in place
    of the loss; None on a rank that does not run it.

    It shares the handles of ``program``, as ``lower_scoring`` does. Raises PlanError, on every rank, if the loss gives
    no label a probability.
    """
    return _loss_stage_again(plan, rank, program, device, LOG_PROBS)


def _loss_stage_again(
    plan: Plan,
    rank: int,
    program: RankProgram,
    device: torch.device | str,
    passes: tuple[Pass, ...],
) -> StageModule | None:
    decisions, shards = plan.to_run()
    check_scored(decisions)
    trained = next((stage for stage in program.stages if stage.has_loss), None)
    if trained is None:
        return None
    context = _context_again(plan, rank, program, device)
    borders = shards.received(trained.index), shards.sent(trained.index)
    return lower_stage_again(context, trained, _local(decisions, context, trained.index), borders, passes)


def lower_kept_rows(
    plan: Plan, rank: int, program: RankProgram, device: torch.device | str = "cpu"
) -> tuple[list[StageModule], list[StageModule], float]:
    """The stages of ``rank`` as they keep rows of all positions, and as they compute one position; they share what
    ``lower_scoring`` shares. Last the eps of the least precise dtype of the logits.

    Raises PlanError, with the op and its line, if one position needs more than kept rows. Other ranks may not raise it.
    """
    decisions, shards = plan.to_run()
    check_scored(decisions)
    rows = one_row_of(decisions)
    context = replace(_context_again(plan, rank, program, device), one_row=rows)
    keeping, alone = [], []
    for stage in program.stages:
        local, borders = (
            _local(decisions, context, stage.index),
            (shards.received(stage.index), shards.sent(stage.index)),
        )
        passes = KEEPING_NEXT_ROWS if stage.has_loss else KEEPING
        keeping.append(lower_stage_again(context, stage, local, borders, passes))
        received, sent = (at_one_position(decisions.program, rows, each) for each in borders)
        alone.append(lower_stage_again(context, stage, local, (received, sent), ONE_ROW))
    return keeping, alone, rows.precision


def _context_again(plan: Plan, rank: int, program: RankProgram, device: torch.device | str) -> LowerContext:
    """The context of ``rank``, with the handles of ``program``."""
    context, _ = context_of(plan, rank, torch.device(device), thorough=False)
    handles = {"tp": program.axes["tp"], "data": program.axes[context.data.name], "random": program.random}
    handles |= {"gate": program.gate or context.gate, "weight_gradients": program.weight_gradients}
    axes = {name: program.axes[name] for name in context.axes}
    return replace(context, **handles, axes=axes, load=program.load or context.load, sums=program.sums)


def check_stages(plan: Plan) -> None:
    """Lower every stage for one tp rank, thoroughly. Raises PassError if a pass did not leave a fact that it must."""
    for pp in range(plan.mesh.pp):
        context, indices = context_of(plan, plan.mesh.rank_of(pp=pp), torch.device("cpu"), thorough=True)
        for index in indices:
            run_passes(extract(context, index), context, PASSES)


def passes_text(plan: Plan, rank: int, *, full: bool = False) -> str:
    """The changes of every pass to every stage of ``rank``; ``full`` shows each repeated block in full.

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


def _constants_of(plan: Plan, graph: fx.GraphModule, known: Mapping[str, torch.Tensor]) -> nn.Module:
    """The tensors that the counts read beside the batch: lifted constants, and buffers of the model (such as class
    weights), unless they are ``known``.
    """
    root, program = nn.Module(), plan.to_run()[0].program
    for node in graph.graph.nodes:
        if node.op == "placeholder" and node.name in program.constants:
            root.register_buffer(node.name, program.constants[node.name].detach().clone())
        elif node.op == "placeholder" and program.buffers.get(node.name) in known:
            root.register_buffer(node.name, known[program.buffers[node.name]])
        elif node.op == "placeholder" and node.name in program.buffers:
            assert plan.model is not None, "the model was released before its buffers were read"
            value = buffer_value(plan.model, program.buffers[node.name])
            root.register_buffer(node.name, value.detach().to(program.node(node.name).meta["val"].dtype, copy=True))
    return root


def _with_constants(program: Program, module: fx.GraphModule) -> fx.Graph:
    """The graph of the counts with constants as attributes, so that only batch tensors are its arguments."""
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder" and (node.name in program.constants or node.name in program.buffers):
            env[node] = graph.create_node("get_attr", node.name)
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
    return graph
