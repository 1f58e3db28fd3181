"""Seconds and bytes of runs: each model is captured once, and cut once for each way to shard it.

A run is one point of the search's own space, so that the figures are those that a search compares.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from passes.errors import PlanError
from planner.captured import Captured, capture_model, inputs_of, prepare
from planner.cost.cut.units import CutWork
from planner.cost.estimate import Estimate, estimate
from planner.pipeline.split import may_be_alone
from planner.predict.runs import Run, Unread
from planner.search.best_first import Candidate
from planner.search.choice import Cut, Point
from planner.search.cuts import Cuts
from planner.search.search import memory_of
from planner.search.space import Space
from planner.search.winner import spec_to_capture
from planner.undisturbed import undisturbed

OF_LAYOUT = ("mesh", "batch", "pipeline", "recompute", "cluster", "devices")  # keys that need no other capture
_FEW = 2  # sequences of the microbatch that is captured


@dataclass(frozen=True)
class Predicted:
    """A run with its estimate. ``usable``: bytes that a process may fill."""

    run: Run
    candidate: Candidate
    usable: float

    @property
    def fits(self) -> bool:
        return self.candidate.fullest.total <= self.usable

    @property
    def error(self) -> float | None:
        """Of the seconds, relative to those measured."""
        measured = self.run.measured.seconds
        return None if measured is None else self.candidate.seconds / measured - 1

    @property
    def memory_error(self) -> float | None:
        measured = self.run.measured.memory
        return None if measured is None else self.candidate.fullest.total / measured - 1


@dataclass
class Predictor:
    """Owns the captures, cuts and works, by the keys that they depend on. ``load``: a module of ``Run.model``."""

    load: Callable[[Any], nn.Module]
    _captured: dict[str, Captured] = field(default_factory=dict)
    _cuts: dict[tuple[str, str, bool], Cuts] = field(default_factory=dict)
    _works: dict[tuple[str, str, bool, Cut], CutWork] = field(default_factory=dict)

    def of(self, run: Run | Unread) -> Predicted | Unread:
        """The prediction, or why there is none."""
        if isinstance(run, Unread):
            return run
        try:
            with undisturbed():
                point, made = self._estimate(run)
        except PlanError as error:
            return Unread(run.name, run.sweep, " ".join(str(run.spec.locate(error)).split()))
        return Predicted(run, Candidate(point, made), memory_of(run.cluster))

    def _estimate(self, run: Run) -> tuple[Point, Estimate]:
        """Raises PlanError."""
        name, recompute, ends = _key(run), str(run.spec.recompute), may_be_alone(run.spec.pipeline.split)
        cuts = self._cuts.get((name, recompute, ends))
        if cuts is None:
            cuts = self._cuts[name, recompute, ends] = self._made(run, name, recompute)
        point = _point(run, cuts)
        key = (name, recompute, ends, point.cut)
        if key not in self._works:
            self._works[key] = cuts.works(point.cut)[recompute]
        return point, estimate(self._works[key], point.layout, run.cluster, run.spec)

    def _made(self, run: Run, name: str, recompute: str) -> Cuts:
        times = 1 if run.spec.num_microbatches == 1 else 2
        batch = run.spec.batch.model_copy(update={"global_size": _FEW * times, "micro": _FEW})
        spec = spec_to_capture(run.spec.model_copy(update={"batch": batch}), None)
        if name not in self._captured:
            self._captured[name] = capture_model(self.load(run.model), spec, inputs_of(spec, None))
        prepared = prepare(self._captured[name], spec)
        return Cuts(prepared, spec, (recompute,), run.cluster)


def _key(run: Run) -> str:
    """Of runs that share a capture."""
    values = {name: value for name, value in run.spec.to_dict().items() if name not in OF_LAYOUT}
    sharded = {k: v for k, v in values.pop("tensor_parallel", {}).items() if k != "sequence_parallel"}
    machine = run.cluster.device.is_gpu, run.cluster.links[0].devices
    shared = (run.model, values, sharded, run.spec.num_microbatches == 1, machine)
    return json.dumps(shared, sort_keys=True, default=str)


def _point(run: Run, cuts: Cuts) -> Point:
    """The one layout that the spec leaves. Raises PlanError if the model or the batch does not admit it."""
    mesh: Any = run.spec.mesh
    devices = mesh.tp * mesh.cp * mesh.pp * mesh.dp
    if devices > run.cluster.devices:
        what = f"its mesh has {devices} devices, the cluster {run.cluster.devices}"
        raise PlanError(what, where="mesh", fix="use a cluster file with more devices")
    space = Space(run.spec, devices, run.cluster.links[0].devices, cuts.facts)
    cut = Cut(mesh.tp, run.spec.tensor_parallel.sequence_parallel is True, mesh.cp, mesh.ep, mesh.etp)
    points = list(space.points(cut, partial(cuts.stages, cut)))
    if not points:
        why = next(iter(space.pruned), "the batch or the model does not divide into it")
        raise PlanError(f"this layout is not possible: {why}", where="mesh", fix="correct mesh, batch or pipeline")
    return points[0]
