"""Lower a plan for one rank: captured graph → this rank's stage modules.

``extract`` makes a stage; then the passes run, in the order below. The runner alone lints the graph and calls the
checks that each pass ``leaves`` (passes/check.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from passes.add_scores import add_scores
from passes.await_parameters import await_parameters
from passes.base import LowerContext, Pass, PassError, StageGraph
from passes.check import (
    collectives_are_those_of_the_plan,
    is_sound,
    no_cp_placeholder_is_left,
    no_op_draws_from_the_default_generator,
    no_op_names_another_device,
    parameters_are_awaited,
    pieces_are_those_of_the_plan,
    readers_get_the_type_that_they_want,
    regions_are_those_of_the_plan,
    reruns_are_those_of_the_plan,
    values_have_their_local_shape,
)
from passes.column_linear import overlap_f
from passes.compile_pieces import compile_pieces
from passes.cut_regions import cut_regions
from passes.dropout import name_streams
from passes.exchange_rows import exchange_rows
from passes.exchange_sequence import exchange_sequence
from passes.extract import extract
from passes.insert_collectives import insert_collectives
from passes.localize import localize
from passes.note_choices import note_choices
from passes.ops.axis import AxisHandle
from passes.ops.load import ExpertLoad
from passes.ops.random_state import RandomState
from passes.own_linears import own_linears
from passes.own_tokens import keep_own_tokens
from passes.peephole import drop_unread, fuse_bias, overwrite_logits, place, place_devices, sum_in_place
from passes.program.program import Program
from passes.recompute import recompute
from passes.stage_module import RankProgram, StageModule
from planner.capture.model.meta_init import buffer_value
from planner.decisions import Decisions
from planner.exchanges.scores import rows_over_classes
from planner.frozen_plan import Plan
from planner.sharding.parameters import local_parameter

PASSES: tuple[Pass, ...] = (
    Pass(insert_collectives, leaves=(readers_get_the_type_that_they_want,)),
    Pass(exchange_rows),
    Pass(exchange_sequence, leaves=(no_cp_placeholder_is_left,)),
    Pass(localize, leaves=(collectives_are_those_of_the_plan,), leaves_slowly=(values_have_their_local_shape,)),
    Pass(keep_own_tokens, leaves=(collectives_are_those_of_the_plan,)),
    Pass(name_streams, leaves=(no_op_draws_from_the_default_generator,)),
    Pass(fuse_bias),
    Pass(sum_in_place),
    Pass(overwrite_logits),
    Pass(overlap_f, leaves=(collectives_are_those_of_the_plan,)),
    Pass(own_linears, leaves=(collectives_are_those_of_the_plan,)),
    Pass(place_devices, leaves=(no_op_names_another_device,)),
    Pass(drop_unread),
    Pass(note_choices),
    Pass(cut_regions, leaves=(regions_are_those_of_the_plan,)),
    Pass(compile_pieces, leaves=(pieces_are_those_of_the_plan,)),
    Pass(recompute, leaves=(reruns_are_those_of_the_plan,)),
    Pass(await_parameters, leaves=(parameters_are_awaited,)),
)
# The stage of the loss for scoring labels: nothing is captured, recomputed, or awaited.
_LOCAL = [step.name for step in PASSES].index("localize") + 1
_ONLY_TRAINING = (note_choices, cut_regions, compile_pieces, recompute, await_parameters)
SCORING: tuple[Pass, ...] = (
    Pass(add_scores, leaves=(collectives_are_those_of_the_plan,)),
    *(step for step in PASSES[_LOCAL:] if step.run not in _ONLY_TRAINING),
)


def lower(plan: Plan, rank: int, device: torch.device | str = "cpu", *, thorough: bool = False) -> RankProgram:
    """All that ``rank`` runs, with parameters and buffers on meta for the runtime to fill.

    ``thorough``: run the slow checks too. Raises PassError if a pass did not leave a fact that it must.
    """
    context, indices = context_of(plan, rank, torch.device(device), thorough=thorough)
    decisions = context.decisions
    modules = [lower_stage(context, index, chunk) for chunk, index in enumerate(indices)]
    counts = decisions.terms.counts
    if counts is not None:
        counts = fx.GraphModule(_constants_of(decisions, counts), _with_constants(decisions.program, counts))
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
        weight_gradients=context.weight_gradients,
    )


def context_of(plan: Plan, rank: int, device: torch.device, *, thorough: bool) -> tuple[LowerContext, tuple[int, ...]]:
    """The context of the passes for ``rank``, and the indices of its stages, chunk by chunk."""
    decisions, shards = plan.to_run()
    here = plan.mesh.place(rank)
    tp, random = AxisHandle("tp", plan.mesh.tp, here["tp"]), RandomState(decisions.seed, here["tp"])
    asked: dict[str, Any] = {"regions": plan.regions, "recomputed": plan.recomputed, "pieces": plan.pieces}
    asked |= {"thorough": thorough, "place": here}
    data = plan.mesh.data_axis
    asked["data"] = AxisHandle(data, plan.mesh.size(data), here[data])
    asked["load"] = ExpertLoad(decisions.noted_experts, decisions.noted_limits, decisions.num_asked)
    asked["axes"] = {a: AxisHandle(a, plan.mesh.size(a), here[a]) for a in _more_axes(plan)}
    context = LowerContext(decisions, shards, plan.collectives, tp, random, device, **asked)
    return context, plan.mesh.stages_of(here["pp"])


def _more_axes(plan: Plan) -> tuple[str, ...]:
    """The axes of experts, if they have their own, and cp, if cp > 1."""
    return (("etp", "ep") if plan.mesh.has_expert_axes else ()) + (("cp",) if plan.mesh.cp > 1 else ())


def lower_stage(context: LowerContext, index: int, chunk: int) -> StageModule:
    """One stage through all passes."""
    stage = extract(context, index)
    run_passes(stage, context, PASSES)
    return _finish(context, stage, chunk)


def lower_scoring(
    plan: Plan, rank: int, program: RankProgram, device: torch.device | str = "cpu"
) -> StageModule | None:
    """The stage of the loss as it returns scores of labels too; None on a rank that does not run it.

    It shares the handles of ``program``, the training program of ``rank``; parameters and buffers are on meta. Raises
    PlanError, on every rank, if the loss gives no label a probability.
    """
    context, _ = context_of(plan, rank, torch.device(device), thorough=False)
    more = rows_over_classes(context.decisions)
    trained = next((stage for stage in program.stages if stage.has_loss), None)
    if trained is None:
        return None
    handles = {"tp": program.axes["tp"], "data": program.axes[context.data.name], "random": program.random}
    axes = {name: program.axes[name] for name in context.axes}
    context = replace(context, **handles, axes=axes, load=program.load or context.load)
    stage = extract(context, trained.index)
    run_passes(stage, context, PASSES[:_LOCAL])
    run_passes(stage, replace(context, rows=(*context.rows, *more)), SCORING)
    return _finish(context, stage, trained.chunk)


def check_stages(plan: Plan) -> None:
    """Lower every stage for one tp rank, thoroughly. Raises PassError if a pass did not leave a fact that it must."""
    for pp in range(plan.mesh.pp):
        context, indices = context_of(plan, plan.mesh.rank_of(pp=pp), torch.device("cpu"), thorough=True)
        for index in indices:
            run_passes(extract(context, index), context, PASSES)


def run_passes(
    stage: StageGraph,
    context: LowerContext,
    passes: tuple[Pass, ...],
    seen: Callable[[str, StageGraph], None] | None = None,
) -> None:
    """The passes in their order; ``seen`` is shown the stage after each.

    Raises PassError if a pass does not leave a fact that it must.
    """
    for step in passes:
        step.run(stage, context)
        for check in (is_sound, *step.leaves, *(step.leaves_slowly if context.thorough else ())):
            for violation in check(stage, context):
                raise PassError(step.name, check.__name__, stage.index, violation)
        if seen is not None:
            seen(step.name, stage)


def _finish(context: LowerContext, stage: StageGraph, chunk: int) -> StageModule:
    decisions, shards, device = context.decisions, context.shards, context.device
    program = decisions.program
    parameters = tuple(
        local_parameter(decisions, program.node(name), stage.index, context.place) for name in stage.parameters
    )
    for name, local in zip(stage.parameters, parameters, strict=True):
        empty = torch.empty(local.shape, dtype=local.dtype, device="meta")
        stage.root.register_parameter(name, nn.Parameter(empty, local.requires_grad))
    for name, buffer in list(stage.root.named_buffers()):
        if name not in stage.buffers:
            stage.root.register_buffer(name, buffer.to(device))
    module = fx.GraphModule(stage.root, stage.graph)
    attributes = {program.parameters[n]: n for n in stage.parameters} | {program.buffers[n]: n for n in stage.buffers}
    held = {n.target for n in stage.graph.nodes if n.op == "get_attr"}
    for handle in held:
        if isinstance(handle, str) and not isinstance(getattr(stage.root, handle), (torch.Tensor, nn.Module)):
            setattr(module, handle, getattr(stage.root, handle))
    return StageModule(
        stage.index,
        chunk,
        module,
        shards.received(stage.index),
        shards.sent(stage.index),
        tuple(program.inputs[n] for n in stage.inputs),
        tuple(decisions.terms.denominators.index(n) for n in stage.denominators),
        parameters,
        tuple(program.buffers[n] for n in stage.buffers),
        attributes,
        stage.has_loss,
        stage.has_scores,
    )


def _constants_of(decisions: Decisions, graph: fx.GraphModule) -> nn.Module:
    """The tensors that the counts read beside the batch: lifted constants, and buffers of the model (such as class
    weights).
    """
    root, program = nn.Module(), decisions.program
    for node in graph.graph.nodes:
        if node.op == "placeholder" and node.name in program.constants:
            root.register_buffer(node.name, program.constants[node.name].detach().clone())
        elif node.op == "placeholder" and node.name in program.buffers:
            assert decisions.model is not None, "the model was released before its buffers were read"
            value = buffer_value(decisions.model, program.buffers[node.name])
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
