"""plan(): the recipe, read top to bottom. Each step decides in the folder of its name.

capture() runs the first step alone, for the plans of several specs.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import torch
from torch import nn

from passes.errors import PlanError
from passes.partition.sequence.facts import Undivided
from planner.capture.resized import Earlier
from planner.captured import Captured, capture_model, inputs_of, prepare
from planner.cluster.cluster import read_cluster
from planner.compiled.pieces import decide_compiled
from planner.cost.memory import memory_rows
from planner.cost.planned import PlannedSeconds, decide_reshard
from planner.frozen_plan import Plan
from planner.lengths import KeptDecisions, of_length, plan_lengths
from planner.mesh import Mesh
from planner.pause_gc import gc_paused
from planner.pipeline.schedule import Schedule, build_schedule, check_schedule, fold_of
from planner.pipeline.simulate import planned
from planner.pipeline.zero_bubble import StageCosts
from planner.progress import shown_if_slow
from planner.recipe import blocks_of, decide_cut, opened
from planner.recompute.decide import decide_recompute
from planner.regions.regions import decide_regions
from planner.regions.static_memory import decide_slots
from planner.saved_plan.model import ModelOwner
from planner.search.search import Progress, Result, check_devices, check_pins, search
from planner.search.winner import chosen, fits_not, planned_spec, spec_to_capture
from planner.sharding.shards import decide_shards
from planner.spec.cluster import shipped_names
from planner.spec.learning_rate import check_rate_function
from planner.spec.spec import Spec
from planner.tables.build import Beside, tables_of
from planner.tables.tables import remark
from planner.trace.lowered import Lowered

_MOST_PLANNED = 8  # layouts that are planned before the search fails because none fits


def capture(
    model: nn.Module,
    spec: Spec | Mapping[str, Any] | str | PathLike[str],
    example_inputs: Mapping[str, torch.Tensor] | None = None,
) -> Captured:
    """Run ``torch.export`` on one microbatch of ``model``, once for the plans of several specs; nothing is allocated.

    model: any nn.Module, with real weights or on the meta device; it is not changed. spec: a YAML file, a dict or a
    Spec, of which ``inputs``, ``batch.micro`` (auto: two sequences), ``loss`` and ``precision.parameters`` are read.
    example_inputs: keyword tensors of ONE microbatch [micro, …] (meta is fine), instead of ``spec.inputs``.
    Raises PlanError if the model cannot be captured: problem, place (module and the user's line), fix.
    """
    checked = _checked(model, spec, "capture", (nn.Module,))
    with _planning(checked):
        capture_spec = spec_to_capture(checked.longest, example_inputs)
        captured = capture_model(model, capture_spec, inputs_of(capture_spec, example_inputs))
        captured.remember_model()
    return captured


def plan(
    model: nn.Module | Captured,
    spec: Spec | Mapping[str, Any] | str | PathLike[str],
    example_inputs: Mapping[str, torch.Tensor] | None = None,
) -> Plan:
    """Decide how ``model`` runs on the mesh of ``spec``; nothing is allocated, no process group is needed.

    model: any nn.Module, with real weights or on the meta device; it is not changed. Or its Captured, which gives the
    same plan without another torch.export (except for ``mesh: auto``, if the fastest layout has another micro).
    spec: a YAML file, a dict or a Spec. example_inputs: keyword tensors of ONE microbatch (meta is fine), by default
    made from ``spec.inputs``. Raises PlanError: problem, place (module and the user's line, or the spec's), fix.

    A Captured is refused for a spec with other inputs (names, shapes, dtypes), another micro, loss or
    precision.parameters, and if the model has changed since: its modules and their classes, forwards, attributes and
    hooks, names, shapes, dtypes, ties and requires_grad of parameters, values of buffers and of tensors that are
    attributes, torch's default dtype, grad mode and autocast. Weights may have other values. Globals that a forward
    reads are not compared.
    """
    checked = _checked(model, spec)
    with _planning(checked, model):
        if checked.lengths and example_inputs is not None:
            what = "example_inputs have one length, but the inputs of the spec have several"
            raise checked.error("inputs", what, "leave out example_inputs, or write one length")
        check_rate_function(checked.optimizer.schedule.kind)
        given = _Given(model, example_inputs, model.earlier if isinstance(model, Captured) else Earlier())
        decide = given.decide_the_fastest if checked.mesh.has_auto else given.decide
        if not checked.lengths:
            return decide(checked)
        try:
            longest = decide(checked.longest)
        except Undivided as error:
            raise of_length(error, checked, checked.lengths[-1]) from error.__cause__
        alone = model.given if isinstance(model, Captured) else model
        return plan_lengths(checked, longest, replace(given, model=alone).decide)


def find_layouts(
    model: nn.Module | Captured,
    spec: Spec | Mapping[str, Any] | str | PathLike[str],
    example_inputs: Mapping[str, torch.Tensor] | None = None,
    *,
    top: int = 5,
    progress: Progress = lambda what, done, total: None,
) -> Result:
    """Return the ``top`` fastest layouts for the ``auto`` keys of ``spec``, and why others are slower or do not fit.

    model, spec, example_inputs: as for plan(). progress: called with the current work, items done, and their total.
    """
    checked = _checked(model, spec).longest
    if not checked.mesh.has_auto:
        raise checked.error("mesh", "no axis of the mesh is auto: there is nothing to search", "write mesh: auto")
    with _planning(checked, model):
        return _Given(model, example_inputs).search(checked, top, progress)[1]


def _checked(
    model: Any,
    spec: Spec | Mapping[str, Any] | str | PathLike[str],
    call: str = "plan",
    kinds: tuple[type, ...] = (nn.Module, Captured),
) -> Spec:
    """Return the loaded spec. Raises PlanError, in the name of ``call``, for a model of none of these ``kinds``."""
    if not isinstance(model, kinds):
        raise PlanError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module",
            where=f"{call}(model, …)",
            fix="pass an nn.Module",
        )
    return Spec.load(spec)


@contextlib.contextmanager
def _planning(spec: Spec, model: nn.Module | Captured | None = None) -> Iterator[None]:
    """Prepare for planning: errors name the lines of ``spec``, and a Captured must still match its model."""
    with spec.locating(), gc_paused(), _on_cpu():
        if isinstance(model, Captured):
            model.check_model()
        yield


@dataclass(frozen=True)
class _Given:
    """A model to plan, or its capture. ``example_inputs``: of one microbatch, if not the spec's. ``earlier``: captures
    of the model at other sizes.
    """

    model: nn.Module | Captured
    example_inputs: Mapping[str, torch.Tensor] | None = None
    earlier: Earlier | None = None

    def captured(self, spec: Spec) -> Captured:
        """Return the capture of the model for ``spec``; one that exists already is checked against ``spec``."""
        if not isinstance(self.model, Captured):
            return capture_model(self.model, spec, inputs_of(spec, self.example_inputs), self.earlier)
        self.model.check_spec(spec, inputs_of(spec, self.example_inputs or self.model.example_for(spec)))
        return self.model

    def search(self, spec: Spec, top: int, progress: Progress) -> tuple[Captured, Result]:
        if spec.cluster is None:
            fix = f"add `cluster: NAME`, a file or one of {', '.join(shipped_names())}; or write all sizes"
            raise spec.error("mesh", "the mesh is auto, but the spec names no cluster to search for", fix)
        cluster = read_cluster(spec.cluster)
        check_pins(spec, check_devices(spec, cluster))  # before a model is captured
        start = time.perf_counter()
        progress("capturing the model", 0, 0)
        example = self.example_inputs
        if example is None and isinstance(self.model, Captured):
            example = self.model.example_for(spec)
        seen = spec_to_capture(spec, example)
        captured = replace(self, example_inputs=example).captured(seen)
        prepared = prepare(captured, seen, on_gpu=cluster.device.is_gpu)
        asked = spec if example is None else seen.model_copy(update={"mesh": spec.mesh})
        spent = time.perf_counter() - start
        result = search(prepared, asked, cluster, top, progress)
        return captured, replace(result, seconds={"capture": spent, **result.seconds})

    def decide_the_fastest(self, spec: Spec) -> Plan:
        """Return the plan of the fastest layout that fits by the memory rows of its full plan too."""
        with shown_if_slow("searching the fastest layout"):
            captured, result = self.search(spec, _MOST_PLANNED, lambda what, done, total: None)
        by_micro, notes = {captured.micro: captured}, []
        for candidate in result.best:
            asked = planned_spec(result.spec, candidate.point)
            micro = int(asked.batch.micro)
            by_micro[micro] = by_micro.get(micro) or replace(self, model=captured.given).captured(asked)
            decided = _Given(by_micro[micro], self.example_inputs).decide(asked)
            most = max((row.total for row in decided.memory), default=0)
            if most <= result.memory_bytes:
                rows = [remark(note, "mesh") for note in (chosen(result, candidate), *notes)]
                return replace(decided, diagnostics=(*decided.diagnostics, *rows))
            notes.append(fits_not(candidate, most, result.memory_bytes))
        what = f"none of the {len(result.best)} fastest layouts fits: {notes[-1]}"
        raise spec.error("mesh", what, "pin recompute: full")

    def decide(self, spec: Spec, held: KeptDecisions | None = None) -> Plan:
        """Run every step that decides or refuses, in order. ``held``: decisions of the plan of another length."""
        cluster = None if spec.cluster is None else read_cluster(spec.cluster)
        mesh = spec.mesh.to_mesh(fold_of(spec.pipeline.schedule), spec.optimizer.shard_group or 0)
        on_gpu = cluster is not None and cluster.device.is_gpu
        captured = self.captured(spec)
        prepared = prepare(captured, spec, on_gpu=on_gpu)
        of = opened(prepared.program, spec, mesh, cluster)
        blocks = blocks_of(of.program, spec)
        decisions, sites = decide_cut(of, blocks, prepared, spec, mesh, held)
        asked = spec.pipeline.schedule
        if not isinstance(asked, Schedule):
            check_schedule(asked, mesh.pp, spec.num_microbatches, mesh.vpp, spec.pipeline.group_size)
        with shown_if_slow("computing shards and collectives of each rank"):
            shards = decide_shards(spec, decisions)
            regions = decide_regions(spec.cuda_graphs, decisions, shards)
            lowered = Lowered(decisions, shards, regions)
            lowered = replace(lowered, recomputed=decide_recompute(spec.recompute, lowered))
            compiled = decide_compiled(spec.compiles(on_gpu=decisions.on_gpu), lowered)
            lowered = replace(lowered, pieces=compiled.pieces)
            seconds = PlannedSeconds(lowered, spec, cluster)
            costs = seconds.stage_costs()
            schedule = planned(_schedule(spec, mesh, costs), costs)
            slots = decide_slots(spec.cuda_graphs, decisions, schedule, regions)
            lowered = decide_reshard(spec.optimizer.reshard, lowered, schedule, slots, cluster)
            memory = memory_rows(lowered, schedule, slots, cluster)
            cost = seconds.cost_row(schedule, reshards=lowered.shards.reshards)
        with shown_if_slow("writing the plan's tables"):
            owner = ModelOwner(captured.given)
            beside = Beside(schedule, compiled, sites, slots, memory, cost)
            tables = tables_of(spec, lowered, beside, cluster, owner.hub)
        return Plan.of(tables, lowered, owner)


def _schedule(spec: Spec, mesh: Mesh, costs: StageCosts | None) -> Schedule:
    asked = spec.pipeline
    if isinstance(asked.schedule, Schedule):
        return asked.schedule
    return build_schedule(asked.schedule, mesh.pp, spec.num_microbatches, mesh.vpp, asked.group_size, costs)


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Return a context with the CPU as default device, as the caller may be inside ``with torch.device("meta")``."""
    is_cpu = torch.get_default_device().type == "cpu"  # then no mode needs to intercept each factory call
    return contextlib.nullcontext() if is_cpu else torch.device("cpu")
