"""Lower one stage for one rank: captured graph → the module that it runs (planner.lower does so for a plan).

``extract`` makes a stage; then the passes run, in the order below. The runner alone lints the graph and calls the
checks that each pass ``leaves`` (passes/check.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx, nn

from passes.add_log_probs import add_log_probs
from passes.add_next_rows import add_next_rows
from passes.add_scores import add_scores
from passes.attend_by_documents import attend_by_documents
from passes.await_parameters import await_parameters
from passes.base import LowerContext, Pass, PassError, StageGraph
from passes.check import (
    is_sound,
    no_cp_placeholder_is_left,
    no_op_draws_from_the_default_generator,
    no_op_names_another_device,
    parameters_are_awaited,
    pieces_are_those_of_the_plan,
    readers_get_the_type_that_they_want,
    regions_are_those_of_the_plan,
    values_have_their_local_shape,
    weights_are_whole,
)
from passes.column_linear import overlap_f
from passes.compile_pieces import compile_pieces
from passes.cut_regions import cut_regions
from passes.dropout import name_streams
from passes.exchange_rows import exchange_rows
from passes.exchange_sequence import exchange_sequence
from passes.extract import extract
from passes.gather_weights import gather_weights
from passes.insert_collectives import insert_collectives
from passes.keep_rows import cut_to_row, keep_rows
from passes.localize import localize
from passes.note_choices import note_choices
from passes.own_linears import own_linears
from passes.own_tokens import keep_own_tokens
from passes.parameters import LocalParameter
from passes.peephole import drop_unread, fuse_bias, overwrite_logits, place_devices, sum_in_place
from passes.program.stages import BoundaryPlan
from passes.recompute import recompute
from passes.stage_module import StageModule

# Up to the program of one rank, which planner.saved traces.
LOCAL: tuple[Pass, ...] = (
    Pass(insert_collectives, leaves=(readers_get_the_type_that_they_want,)),
    Pass(exchange_rows),
    Pass(exchange_sequence, leaves=(no_cp_placeholder_is_left,)),
    Pass(localize, leaves_slowly=(values_have_their_local_shape,)),
    Pass(keep_own_tokens),
    Pass(name_streams, leaves=(no_op_draws_from_the_default_generator,)),
    Pass(attend_by_documents),
    Pass(fuse_bias),
    Pass(sum_in_place),
    Pass(overwrite_logits),
    Pass(overlap_f),
    Pass(own_linears),
    Pass(place_devices, leaves=(no_op_names_another_device,)),
    Pass(drop_unread),
)
PASSES: tuple[Pass, ...] = (
    *LOCAL,
    Pass(note_choices),
    Pass(cut_regions, leaves=(regions_are_those_of_the_plan,)),
    Pass(compile_pieces, leaves=(pieces_are_those_of_the_plan,)),
    Pass(recompute),
    Pass(await_parameters, leaves=(parameters_are_awaited,)),
    Pass(gather_weights, leaves=(weights_are_whole,)),
)
# The stage of the loss for scoring labels: nothing is captured, recomputed, or awaited.
_LOCALIZED = [step.name for step in PASSES].index("localize") + 1
_ONLY_TRAINING = (note_choices, cut_regions, compile_pieces, recompute, await_parameters)
_BEHIND: tuple[Pass, ...] = (*(step for step in PASSES[_LOCALIZED:] if step.run not in _ONLY_TRAINING),)

SCORING: tuple[Pass, ...] = (*PASSES[:_LOCALIZED], Pass(add_scores), *_BEHIND)
NEXT_ROWS: tuple[Pass, ...] = (*PASSES[:_LOCALIZED], Pass(add_next_rows), *_BEHIND)
# A stage that keeps rows for generation, that of the loss, and any stage at one position of a sequence.
KEEPING: tuple[Pass, ...] = (*PASSES[:_LOCALIZED], Pass(keep_rows), *_BEHIND)
KEEPING_NEXT_ROWS: tuple[Pass, ...] = (*PASSES[:_LOCALIZED], Pass(keep_rows), Pass(add_next_rows), *_BEHIND)
_OF_ONE_ROW = (name_streams, place_devices, drop_unread, gather_weights)
ONE_ROW: tuple[Pass, ...] = (
    *PASSES[:_LOCALIZED],
    Pass(cut_to_row),
    *(step for step in PASSES[_LOCALIZED:] if step.run in _OF_ONE_ROW),
)
LOCAL_SCORES: tuple[Pass, ...] = (*LOCAL[:_LOCALIZED], Pass(add_scores), *LOCAL[_LOCALIZED:])
# A stage for a loss outside the model: as it trains, but nothing is captured or compiled.
LOCAL_LOG_PROBS: tuple[Pass, ...] = (*LOCAL[:_LOCALIZED], Pass(add_log_probs), *LOCAL[_LOCALIZED:])
LOG_PROBS: tuple[Pass, ...] = (
    *LOCAL_LOG_PROBS,
    *(step for step in PASSES[len(LOCAL) :] if step.run not in (cut_regions, compile_pieces)),
)

Borders = tuple[tuple[BoundaryPlan, ...], tuple[BoundaryPlan, ...]]


def lower_stage(
    context: LowerContext, index: int, chunk: int, local: Callable[[str], LocalParameter], borders: Borders
) -> StageModule:
    """One stage through all passes. ``local``: this rank's part of a parameter; ``borders``: values received, sent."""
    stage = extract(context, index)
    run_passes(stage, context, PASSES)
    return finish(context, stage, chunk, local, borders)


def lower_stage_again(
    context: LowerContext,
    trained: StageModule,
    local: Callable[[str], LocalParameter],
    borders: Borders,
    passes: tuple[Pass, ...],
) -> StageModule:
    """A stage once more. That of the loss: by ``SCORING`` it returns scores of labels too, by ``NEXT_ROWS`` the logits
    of one position, and by ``LOG_PROBS``, for training, log-probabilities of labels in place of the loss. Any stage: by
    ``KEEPING`` it keeps rows, and by ``ONE_ROW`` it computes one position.
    """
    stage = extract(context, trained.index)
    run_passes(stage, context, passes)
    return finish(context, stage, trained.chunk, local, borders)


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


def finish(
    context: LowerContext, stage: StageGraph, chunk: int, local: Callable[[str], LocalParameter], borders: Borders
) -> StageModule:
    """The module of a stage after its passes: parameters and buffers on meta, constants on the device."""
    program, device = context.lowering.program, context.device
    parameters = tuple(map(local, stage.parameters))
    for name, own in zip(stage.parameters, parameters, strict=True):
        empty = torch.empty(own.shape, dtype=own.dtype, device="meta")
        stage.root.register_parameter(name, nn.Parameter(empty, own.requires_grad))
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
        *borders,
        tuple(program.inputs[n] for n in stage.inputs),
        tuple(context.lowering.denominators.index(n) for n in stage.denominators),
        parameters,
        tuple(program.buffers[n] for n in stage.buffers),
        attributes,
        stage.has_loss,
        stage.has_scores,
    )
