"""plan(): the recipe, read top to bottom. What each step decides is in the room of its name."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn

from planner.capture.batch.two_captures import wider
from planner.capture.canonical.masks import simplify_masks
from planner.capture.export import capture
from planner.capture.loss.shares import LossTerms, share_loss
from planner.cost.memory import memory_rows
from planner.decisions import Decisions
from planner.errors import PlanError
from planner.frozen_plan import Plan
from planner.graph.blocks.blocks import Blocks, find_blocks
from planner.graph.program import Program
from planner.mesh import Mesh
from planner.pipeline.schedule import build_schedule
from planner.pipeline.simulate import planned
from planner.pipeline.stages import assign_stages
from planner.placement.attention.sites import AttentionSite, attention_sites, check_attention
from planner.placement.decide import Placements, decide_placements
from planner.placement.overrides.kinds import kinds_by_override
from planner.placement.rules.table import has_rule
from planner.placement.uncut import check_something_is_cut
from planner.regions.regions import decide_regions
from planner.regions.static_memory import decide_slots
from planner.sharding.shards import decide_shards
from planner.slow_steps import shown_if_slow
from planner.spec.spec import Spec
from planner.tables.build import tables_of


def plan(
    model: nn.Module,
    spec: Spec | Mapping[str, Any] | str | PathLike[str],
    example_inputs: Mapping[str, torch.Tensor] | None = None,
) -> Plan:
    """Decide how ``model`` runs on the mesh of ``spec``; nothing is allocated, no process group is needed.

    model: any nn.Module, with real weights or on the meta device; it is not changed.
    spec: a YAML file, a dict or a Spec. example_inputs: keyword tensors of ONE microbatch (meta is fine); without them
    they are made from ``spec.inputs``. Raises PlanError: what, where (module and the user's line, or the spec's), fix.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module",
            where="plan(model, …)",
            fix="give the module itself",
        )
    checked = Spec.load(spec)
    try:
        with _on_cpu():
            return _decide(model, checked, example_inputs)
    except PlanError as error:
        raise checked.locate(error) from error.__cause__


def _decide(model: nn.Module, spec: Spec, example_inputs: Mapping[str, torch.Tensor] | None) -> Plan:
    """Every step that decides or refuses, in its order."""
    _refuse_what_is_missing(spec)
    mesh = _mesh(spec)
    inputs = _inputs_of(spec) if example_inputs is None else _checked_inputs(spec, example_inputs)
    program, terms = _captured(model, spec, inputs)
    blocks, placements, sites = _placed(program, spec, mesh)
    stages = assign_stages(program, blocks, mesh.pp, mesh.vpp, spec.pipeline.split)
    schedule = planned(
        build_schedule(spec.pipeline.schedule, mesh.pp, spec.num_microbatches, mesh.vpp, spec.pipeline.group_size)
    )
    decisions = Decisions(program, blocks, placements, stages, terms, mesh, spec.seed, model)
    with shown_if_slow("laying out what each rank holds and exchanges"):
        shards = decide_shards(spec, decisions)
        regions = decide_regions(spec.cuda_graphs, decisions, shards)
        slots = decide_slots(spec.cuda_graphs, decisions, schedule, regions)
        memory = memory_rows(spec, decisions, shards, schedule, slots)
    with shown_if_slow("writing the plan's tables"):
        tables = tables_of(spec, decisions, shards, schedule, sites, memory, regions, slots)
    return Plan.of(tables, decisions, shards, regions)


def _captured(model: nn.Module, spec: Spec, inputs: Mapping[str, torch.Tensor]) -> tuple[Program, LossTerms]:
    """The canonical program, its loss as the share of one microbatch, and what those shares are divided by."""
    with shown_if_slow("capturing the model"):
        program = capture(model, inputs, has_rule=has_rule, loss=spec.loss, dtype=_dtype(spec))
        simplify_masks(program)

    def at_size(times: int) -> Program:  # where one capture leaves in doubt how the loss follows the batch
        with shown_if_slow("capturing the model at another batch size"):
            return capture(model, wider(inputs, times), has_rule=has_rule, loss=spec.loss, dtype=_dtype(spec))

    return program, share_loss(program, spec.batch.global_size // spec.batch.micro, at_size)


def _placed(program: Program, spec: Spec, mesh: Mesh) -> tuple[Blocks, Placements, tuple[AttentionSite, ...]]:
    """Repeated blocks, the type of every value over tp, the attention; a tp that cuts nothing is refused."""
    asked = spec.tensor_parallel
    with shown_if_slow("finding the repeated blocks"):
        blocks = kinds_by_override(program, find_blocks(program), asked.overrides)
    with shown_if_slow(f"deciding how to cut {blocks.num_kinds} kinds of blocks over tp {mesh.tp}"):
        placements = decide_placements(
            program,
            blocks,
            mesh.tp,
            dict(asked.overrides),
            sequence_parallel=asked.sequence_parallel,
            vocabulary_multiple=asked.vocabulary_multiple,
        )
    sites = attention_sites(program, blocks, placements)
    check_attention(program, placements, sites)
    check_something_is_cut(program, blocks, placements, sites, asked.vocabulary_multiple)
    return blocks, placements, sites


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """The caller may stand in `with torch.device("meta")`; where not, nothing has to watch each factory call."""
    is_cpu = torch.get_default_device().type == "cpu"
    return contextlib.nullcontext() if is_cpu else torch.device("cpu")


def _refuse_what_is_missing(spec: Spec) -> None:
    """What a spec may ask for and this version cannot do is an error, never ignored."""
    if spec.mesh.has_auto:
        raise PlanError("mesh: auto is not available yet", where="mesh", fix="give tp, pp and dp as numbers")
    if spec.recompute != "none":
        raise PlanError(
            f"recompute = {spec.recompute} is not available yet", where="recompute", fix="set recompute: none"
        )
    if spec.cluster is not None:
        raise PlanError("a cluster file is not read yet", where="cluster", fix="remove the key")


def _mesh(spec: Spec) -> Mesh:
    m = spec.mesh
    for axis in ("cp", "ep"):
        if getattr(m, axis) != 1:
            raise PlanError(
                f"mesh.{axis} = {getattr(m, axis)} is not available yet", where=f"mesh.{axis}", fix=f"set {axis}: 1"
            )
    return m.to_mesh()


def _checked_inputs(spec: Spec, example_inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The caller's example, if it is one microbatch."""
    for name, value in example_inputs.items():
        if not isinstance(value, torch.Tensor):
            raise PlanError(
                f"example_inputs[{name!r}] is a {type(value).__name__}",
                where="plan(…, example_inputs)",
                fix="give tensors, on any device",
            )
        if value.dim() == 0 or value.shape[0] != spec.batch.micro:
            raise PlanError(
                f"example_inputs[{name!r}] has shape {list(value.shape)}, a microbatch {spec.batch.micro} rows",
                where="batch.micro",
                fix=f"give {spec.batch.micro} rows of each input, or set batch.micro",
            )
    return dict(example_inputs)


def _inputs_of(spec: Spec) -> dict[str, torch.Tensor]:
    """One microbatch of every input, without memory."""
    return {
        name: torch.empty((spec.batch.micro, *given.shape), dtype=getattr(torch, given.dtype), device="meta")
        for name, given in spec.require_inputs().items()
    }


def _dtype(spec: Spec) -> torch.dtype | None:
    return None if spec.precision.parameters is None else getattr(torch, spec.precision.parameters)
