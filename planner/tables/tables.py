"""All rows of a plan, checked against each other: they are printed, saved and compared."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from passes.errors import require
from passes.types.collectives import CollectivePlan
from planner.compiled.rows import CompiledRow
from planner.cost.memory import MemoryRow
from planner.cost.step_time import CostPlan
from planner.mesh import Mesh
from planner.pipeline.schedule import SchedulePlan
from planner.recompute.rows import RecomputeRow
from planner.regions.regions import GraphRegion
from planner.regions.static_memory import GraphSlots
from planner.sharding.buffers import OptimizerPlan
from planner.sharding.parameters import ParameterPlan
from planner.tables.codec import encode
from planner.tables.experts import ExpertsPlan
from planner.tables.rows import Diagnostic, LengthPlan, StagePlan, Summary

VERSION = 1
_REMARKS = {"where", "origin", "reason"}  # words for people: file names and wording may differ between machines


@dataclass(frozen=True, slots=True)
class Tables:
    """``spec`` is the spec as a dict; the other fields are the tables of the JSON, by their keys."""

    spec: dict[str, Any]
    mesh: Mesh
    parameters: tuple[ParameterPlan, ...]
    collectives: tuple[CollectivePlan, ...]
    stages: tuple[StagePlan, ...]
    schedule: SchedulePlan
    experts: tuple[ExpertsPlan, ...] = ()
    graph_regions: tuple[GraphRegion, ...] = ()
    graph_slots: tuple[GraphSlots, ...] = ()
    recompute: tuple[RecomputeRow, ...] = ()
    compiled: tuple[CompiledRow, ...] = ()
    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)
    lengths: tuple[LengthPlan, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    cost: CostPlan | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    summary: Summary = field(default_factory=Summary)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", encode(self.spec))
        num_stages = self.mesh.pp * self.mesh.vpp
        names = [p.name for p in self.parameters]
        require(len(self.stages) == num_stages, f"{len(self.stages)} stages for pp·vpp = {num_stages}")
        require([s.index for s in self.stages] == list(range(num_stages)), "the stages are out of order")
        require(
            len(self.schedule.orders) == self.mesh.pp, f"{len(self.schedule.orders)} orders for pp = {self.mesh.pp}"
        )
        peaks = len(self.schedule.peak_in_flight)
        require(peaks in (0, self.mesh.pp), f"{peaks} peaks of microbatches in flight for pp = {self.mesh.pp}")
        require(isinstance(self.spec.get("batch", {}), dict), "the batch of its spec is no mapping")
        require(len(names) == len(set(names)), "a parameter is listed twice")
        for parameter in self.parameters:
            inside = all(0 <= stage < num_stages for stage in parameter.stages)
            require(inside and bool(parameter.stages), f"{parameter.name} is on stages {parameter.stages}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, with ``version`` first."""
        return {"version": VERSION, **encode(self)}

    def hash(self) -> str:
        """SHA-256 of the decisions: ranks that must run together have the same one.

        Left out: estimates, diagnostics, and remarks that name files, which may lie elsewhere on another machine.
        """
        values = self.to_dict()
        for name in ("cost", "memory", "diagnostics", "summary"):
            del values[name]
        values["spec"].pop("cluster", None)
        values["lengths"] = [row.decisions for row in self.lengths]
        text = json.dumps(_without_remarks(values), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _without_remarks(values: dict[str, Any]) -> dict[str, Any]:
    def strip(row: Any) -> Any:
        return {k: v for k, v in row.items() if k not in _REMARKS} if isinstance(row, dict) else row

    return {name: [strip(row) for row in value] if isinstance(value, list) else value for name, value in values.items()}
