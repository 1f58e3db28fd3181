"""plan(): the recipe, read top to bottom. What each step decides is in the room of its name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import nn

from planner.capture.batch.fixed_lookups import check_fixed_lookups
from planner.capture.batch.two_captures import wider
from planner.capture.canonical.masks import simplify_masks
from planner.capture.canonical.norms import fuse_norms
from planner.capture.kept.captures import capture, captures_shared
from planner.capture.loss.shares import LossTerms, share_loss
from planner.cluster.read import read_cluster
from planner.compiled.pieces import decide_compiled
from planner.context.cut import cut_sequence
from planner.context.own_keys import keep_own_keys
from planner.cost.memory import memory_rows
from planner.cost.planned import cost_row, costs_of_stages
from planner.decisions import Decisions
from planner.draws.places import check_draws, name_draws
from planner.errors import PlanError
from planner.experts.find import find_experts
from planner.experts.open import open_experts
from planner.frozen_plan import Plan
from planner.graph.blocks.blocks import Blocks, find_blocks
from planner.graph.program import Program
from planner.mesh import Mesh
from planner.pipeline.schedule import Schedule, build_schedule, check_schedule, fold_of
from planner.pipeline.simulate import planned
from planner.pipeline.stages import assign_stages
from planner.pipeline.zero_bubble import StageCosts
from planner.placement.attention.sites import AttentionSite, attention_sites, check_attention
from planner.placement.decide import Placements, decide_placements
from planner.placement.overrides.kinds import kinds_by_override
from planner.placement.rules.table import has_rule
from planner.placement.uncut import check_something_is_cut
from planner.recompute.decide import decide_recompute
from planner.regions.own_tokens import keep_own_tokens
from planner.regions.regather import gather_again
from planner.regions.regions import decide_regions
from planner.regions.static_memory import decide_slots
from planner.search.cuts import Captured
from planner.search.search import Progress, Result, search
from planner.search.winner import check_before_capture, chosen, fits_not, planned_spec, spec_to_capture
from planner.sharding.shards import decide_shards
from planner.slow_steps import shown_if_slow
from planner.spec.cluster import shipped_names
from planner.spec.spec import Spec
from planner.tables.build import tables_of
from planner.tables.rows import Diagnostic
from planner.undisturbed import undisturbed

_MOST_PLANNED = 8  # layouts that are planned before it is told that none fits


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
        with undisturbed(), _on_cpu(), captures_shared():
            decide = _decide_the_fastest if checked.mesh.has_auto else _decide
            return decide(model, checked, example_inputs)
    except PlanError as error:
        raise checked.locate(error) from error.__cause__


def find_layouts(
    model: nn.Module,
    spec: Spec | Mapping[str, Any] | str | PathLike[str],
    example_inputs: Mapping[str, torch.Tensor] | None = None,
    *,
    top: int = 5,
    progress: Progress = lambda what, done, total: None,
) -> Result:
    """The ``top`` fastest layouts of what ``spec`` leaves to auto, and why others lose."""
    checked = Spec.load(spec)
    if not checked.mesh.has_auto:
        raise checked.error("mesh", "no axis of the mesh is auto: there is nothing to search", "write mesh: auto")
    try:
        with undisturbed(), _on_cpu(), captures_shared():
            return _search(model, checked, example_inputs, top, progress)
    except PlanError as error:
        raise checked.locate(error) from error.__cause__


def _search(
    model: nn.Module, spec: Spec, example_inputs: Mapping[str, torch.Tensor] | None, top: int, progress: Progress
) -> Result:
    """Capture once, then search."""
    if spec.cluster is None:
        fix = f"add `cluster: NAME`, of a file or one of {', '.join(shipped_names())}; or write all sizes"
        raise spec.error("mesh", "the mesh is auto, but the spec names no cluster: what is fast depends on it", fix)
    cluster = read_cluster(spec.cluster)
    check_before_capture(spec, cluster)
    start = time.perf_counter()
    progress("capturing the model", 0, 0)
    seen = spec_to_capture(spec, example_inputs)
    inputs = _inputs_of(seen) if example_inputs is None else _checked_inputs(seen, example_inputs)
    program, terms = _captured(model, seen, inputs)
    captured = Captured(program, terms, model, int(seen.batch.micro))
    asked = spec if example_inputs is None else seen.model_copy(update={"mesh": spec.mesh})
    spent = time.perf_counter() - start
    result = search(captured, asked, cluster, top, progress)
    return replace(result, seconds={"capture": spent, **result.seconds})


def _decide_the_fastest(model: nn.Module, spec: Spec, example_inputs: Mapping[str, torch.Tensor] | None) -> Plan:
    """The plan of the fastest layout that also fits by the plan's own rows of memory."""
    with shown_if_slow("searching the fastest layout"):
        result = _search(model, spec, example_inputs, _MOST_PLANNED, lambda what, done, total: None)
    notes: list[str] = []
    for candidate in result.best:
        found = _decide(model, planned_spec(result.spec, candidate.point), example_inputs)
        most = max((row.total for row in found.memory), default=0)
        if most <= result.memory_bytes:
            rows = [Diagnostic("info", note, "mesh") for note in (chosen(result, candidate), *notes)]
            return replace(found, diagnostics=(*found.diagnostics, *rows))
        notes.append(fits_not(candidate, most, result.memory_bytes))
    raise spec.error("mesh", f"none of the {len(result.best)} fastest layouts fits: {notes[-1]}", "pin recompute: full")


def _decide(model: nn.Module, spec: Spec, example_inputs: Mapping[str, torch.Tensor] | None) -> Plan:
    """Every step that decides or refuses, in its order."""
    cluster = None if spec.cluster is None else read_cluster(spec.cluster)
    mesh = _mesh(spec)
    inputs = _inputs_of(spec) if example_inputs is None else _checked_inputs(spec, example_inputs)
    program, terms = _captured(model, spec, inputs)
    with shown_if_slow(f"cutting the sequence over cp {mesh.cp}"):
        context = keep_own_keys(program, cut_sequence(program, mesh.cp), mesh.tp)
    found = find_experts(program)
    experts = open_experts(program, found, mesh)
    check_draws(program)
    blocks, placements, sites = _placed(program, spec, mesh)
    stages = assign_stages(program, blocks, mesh.pp, mesh.vpp, spec.pipeline.split, fold=mesh.fold)
    check_schedule(spec.pipeline.schedule, mesh.pp, spec.num_microbatches, mesh.vpp, spec.pipeline.group_size)
    decisions = Decisions(
        program, blocks, placements, stages, terms, mesh, spec.seed, model, experts=experts, context=context,
        on_gpu=cluster is not None and cluster.device.is_gpu,
    )  # fmt: skip
    with shown_if_slow("laying out what each rank holds and exchanges"):
        shards = decide_shards(spec, decisions)
        if spec.recompute == "none" and spec.cuda_graphs.impl == "none":
            decisions.context = keep_own_tokens(decisions, shards)
        regions = decide_regions(spec.cuda_graphs, decisions, shards)
        if spec.tensor_parallel.sequence_parallel and spec.tensor_parallel.regather:
            shards = gather_again(shards, decisions, regions)
        recomputed = decide_recompute(spec.recompute, decisions, shards, regions)
        compiled = decide_compiled(spec.compile, decisions, shards, regions, recomputed)
        costs = costs_of_stages(decisions, shards, spec, spec.pipeline.schedule, recomputed, cluster)
        schedule = planned(_schedule(spec, mesh, costs), costs)
        slots = decide_slots(spec.cuda_graphs, decisions, schedule, regions)
        memory = memory_rows(decisions, shards, schedule, slots, recomputed)
        cost = cost_row(decisions, shards, spec, schedule, recomputed, cluster)
    with shown_if_slow("writing the plan's tables"):
        tables = tables_of(
            spec, decisions, shards, schedule, sites, memory, regions, slots, recomputed, cost, cluster, compiled
        )
    return Plan.of(tables, decisions, shards, regions, recomputed, compiled)


def _schedule(spec: Spec, mesh: Mesh, costs: StageCosts | None) -> Schedule:
    asked = spec.pipeline
    return build_schedule(asked.schedule, mesh.pp, spec.num_microbatches, mesh.vpp, asked.group_size, costs)


def _captured(model: nn.Module, spec: Spec, inputs: Mapping[str, torch.Tensor]) -> tuple[Program, LossTerms]:
    """The canonical program, its loss as the share of one microbatch, and what those shares are divided by."""
    with shown_if_slow("capturing the model"):
        program = capture(model, inputs, has_rule=has_rule, loss=spec.loss, dtype=_dtype(spec))
        simplify_masks(program)
        check_fixed_lookups(program)
    if spec.dropout == "layout_invariant":
        name_draws(program, int(spec.batch.micro))

    def at_size(times: int) -> Program:  # where one capture leaves in doubt how the loss follows the batch
        with shown_if_slow("capturing the model at another batch size"):
            return capture(
                model, wider(inputs, times), has_rule=has_rule, loss=spec.loss, dtype=_dtype(spec), is_known=True
            )

    num_microbatches = spec.batch.global_size // int(spec.batch.micro)
    terms = share_loss(program, num_microbatches, at_size, at_once=spec.num_microbatches == 1)
    if spec.fuse_norms:
        fuse_norms(program)
    return program, terms


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
            sequence_parallel=asked.sequence_parallel is True,
            vocabulary_multiple=asked.vocabulary_multiple,
            etp=mesh.etp,
        )
    sites = attention_sites(program, blocks, placements)
    check_attention(program, placements, sites)
    check_something_is_cut(program, blocks, placements, sites, asked.vocabulary_multiple)
    return blocks, placements, sites


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """The caller may stand in `with torch.device("meta")`; where not, nothing has to watch each factory call."""
    is_cpu = torch.get_default_device().type == "cpu"
    return contextlib.nullcontext() if is_cpu else torch.device("cpu")


def _mesh(spec: Spec) -> Mesh:
    mesh = spec.mesh.to_mesh(fold_of(spec.pipeline.schedule))
    if mesh.cp > 1 and mesh.has_expert_axes:
        raise PlanError(
            f"cp = {mesh.cp} with ep = {mesh.ep}, etp = {mesh.etp}: experts over axes of their own are not cut over cp",
            where="mesh.cp",
            fix="set cp: 1; or set ep: 1 and leave etp out",
        )
    return mesh


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
        name: torch.empty((int(spec.batch.micro), *given.shape), dtype=getattr(torch, given.dtype), device="meta")
        for name, given in spec.require_inputs().items()
    }


def _dtype(spec: Spec) -> torch.dtype | None:
    return None if spec.precision.parameters is None else getattr(torch, spec.precision.parameters)
