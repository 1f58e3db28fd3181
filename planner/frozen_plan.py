"""The Plan: every decision as frozen tables, the same on every machine; saved, compared, hashed and printed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from planner.errors import PlanError, require
from planner.mesh import Mesh
from planner.tables.codec import decode, encode, to_text, write_atomic
from planner.tables.rows import (
    BoundaryPlan,
    BucketPlan,
    BufferPlan,
    CollectivePlan,
    CostPlan,
    Diagnostic,
    GraphRegion,
    MemoryRow,
    OptimizerPlan,
    ParameterPlan,
    SchedulePlan,
    StagePlan,
    Summary,
)

__all__ = [
    "BoundaryPlan",
    "BucketPlan",
    "BufferPlan",
    "CollectivePlan",
    "CostPlan",
    "Diagnostic",
    "GraphRegion",
    "MemoryRow",
    "OptimizerPlan",
    "ParameterPlan",
    "Plan",
    "SchedulePlan",
    "StagePlan",
    "Summary",
]

VERSION = 1
_REMARKS = {"where", "origin", "reason"}  # words for people: file names and wording may differ between machines


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs where, for every rank. Frozen; equal plans compare equal, with or without their ``source``.

    ``spec`` is the spec as a dict. ``source`` holds the captured program, its placements and the model for lowering; it
    is not saved, so a loaded plan prints, compares and hashes, and has none.
    """

    spec: dict[str, Any]
    mesh: Mesh
    parameters: tuple[ParameterPlan, ...]
    collectives: tuple[CollectivePlan, ...]
    stages: tuple[StagePlan, ...]
    schedule: SchedulePlan
    graph_regions: tuple[GraphRegion, ...] = ()
    optimizer: OptimizerPlan = field(default_factory=OptimizerPlan)
    memory: tuple[MemoryRow, ...] = ()
    cost: CostPlan | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    summary: Summary = field(default_factory=Summary)
    source: object | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", encode(self.spec))
        num_stages = self.mesh.pp * self.mesh.vpp
        names = [p.name for p in self.parameters]
        require(len(self.stages) == num_stages, f"{len(self.stages)} stages for pp·vpp = {num_stages}")
        require([s.index for s in self.stages] == list(range(num_stages)), "the stages are out of order")
        require(
            len(self.schedule.orders) == self.mesh.pp, f"{len(self.schedule.orders)} orders for pp = {self.mesh.pp}"
        )
        require(len(names) == len(set(names)), "a parameter is listed twice")
        for parameter in self.parameters:
            inside = all(0 <= stage < num_stages for stage in parameter.stages)
            require(inside and bool(parameter.stages), f"{parameter.name} is on stages {parameter.stages}")

    def describe(self, *, full: bool = False) -> str:
        """The tables as plain text, the same on every machine; ``full`` gives repeated blocks a row each."""
        from planner.report.text import to_text as explain  # explain reads Plan: importing it above would be a circle

        return explain(self, full=full)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values, with ``version`` first."""
        return {"version": VERSION, **encode(self)}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all. Raises PlanError where the place cannot be written."""
        try:
            write_atomic(Path(path), to_text(self.to_dict()))
        except OSError as error:
            raise PlanError(
                f"cannot write the plan: {error.strerror}",
                where=str(path),
                fix="choose a directory that exists and is writable",
            ) from None

    @staticmethod
    def load(path: str | PathLike[str]) -> Plan:
        """What ``save`` wrote. Raises PlanError for a file that is missing, cut short or of another version."""
        try:
            return Plan.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise PlanError(
                f"cannot read the plan: {error.strerror}", where=str(path), fix="give a saved plan"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise PlanError(
                f"the plan is damaged or cut short: {error}", where=str(path), fix="save the plan again"
            ) from None
        except PlanError as error:
            raise PlanError(
                error.what, where=str(path), fix=error.fix or "save the plan again with this version"
            ) from None

    @staticmethod
    def from_dict(values: Any) -> Plan:
        """The plan of what ``to_dict`` gave. Raises PlanError."""
        if not isinstance(values, dict) or "version" not in values:
            raise PlanError("this is not a saved plan: it has no version")
        if values["version"] != VERSION:
            raise PlanError(f"the plan has version {values['version']}, this program reads version {VERSION}")
        return decode(Plan, {name: value for name, value in values.items() if name != "version"}, "plan")

    def hash(self) -> str:
        """SHA-256 of the decisions: ranks that must run together have the same one.

        Left out: estimates, diagnostics, and remarks that name files, which may lie elsewhere on another machine.
        """
        values = self.to_dict()
        for name in ("cost", "memory", "diagnostics", "summary"):
            del values[name]
        values["spec"].pop("cluster", None)
        text = json.dumps(_without_remarks(values), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _without_remarks(values: dict[str, Any]) -> dict[str, Any]:
    def strip(row: Any) -> Any:
        return {k: v for k, v in row.items() if k not in _REMARKS} if isinstance(row, dict) else row

    return {name: [strip(row) for row in value] if isinstance(value, list) else value for name, value in values.items()}
