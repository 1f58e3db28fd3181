"""The tables of a plan, as they are printed, saved and compared, and the rows that no other module defines.

The other rows are defined beside their decisions: parameters, collectives, boundaries and buffers in planner/sharding,
the schedule in planner/pipeline, memory in planner/cost, the mesh in planner/mesh.py. Rows contain only ints, strings
and tuples, so they can be saved and compared. A row validates itself, and Tables the rows against each other, whether
the planner or a file made them. The JSON keys are the field names.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from passes.errors import PlanError, require
from passes.program.program import BoundaryPlan
from passes.types.conversions import CollectivePlan
from planner.compiled.pieces import CompiledRow
from planner.cost.layout import CostPlan
from planner.cost.memory import MemoryRow
from planner.mesh import Mesh
from planner.pipeline.actions import Action
from planner.pipeline.schedule import SchedulePlan
from planner.recompute.decide import RecomputeRow
from planner.regions.regions import GraphRegion
from planner.regions.static_memory import GraphSlots
from planner.sharding.buffers import OptimizerPlan
from planner.sharding.parameters import ParameterPlan

VERSION = 1
_REMARKS = {"where", "origin", "reason"}  # texts for people, with file names that may differ between machines


def encode(value: Any) -> Any:
    """Return a row, a tuple of rows or a plain value as JSON values."""
    if dataclasses.is_dataclass(value):
        return {name: encode(getattr(value, name)) for name in _hints(type(value))}
    if isinstance(value, dict):
        return {str(name): encode(item) for name, item in value.items()}
    return [encode(item) for item in value] if isinstance(value, (tuple, list)) else value


def decode(kind: Any, value: Any, path: str) -> Any:
    """Return the value of type ``kind`` that ``encode`` wrote. Raises PlanError with the ``path`` of a wrong value."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _decode_row(kind, value, path)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        inner = next(a for a in arguments if a is not NoneType)
        return None if value is None else decode(inner, value, path)
    if origin is tuple:
        return _decode_tuple(arguments, value, path)
    if kind is Action:
        return Action(*_decode_tuple((str, int, int), value, path))
    if origin is dict or kind is dict:
        return _expect(value, dict, path)
    if origin is Literal:
        if value not in arguments:
            what = f"{path} must be one of {', '.join(map(str, arguments))}, not {value!r}"
            raise _of_another_version(what)
        return value
    if kind is float:
        return float(_expect(value, (int, float), path))
    return _expect(value, kind, path)


def _decode_row(kind: type, value: Any, path: str) -> Any:
    _expect(value, dict, path)
    hints = _hints(kind)
    required = {f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
    for name in (*sorted(required - value.keys()), *sorted(value.keys() - hints.keys())):
        problem = "is missing" if name in required else "is unknown"
        raise _of_another_version(f"{path}.{name} {problem}")
    return kind(**{name: decode(hints[name], item, f"{path}.{name}") for name, item in value.items()})


def _decode_tuple(arguments: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    _expect(value, list, path)
    kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
    if len(kinds) != len(value):
        raise _of_another_version(f"{path} must have {len(kinds)} items, not {len(value)}")
    return tuple(
        decode(kind, item, f"{path}[{index}]") for index, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _expect(value: Any, kind: Any, path: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = kind.__name__ if isinstance(kind, type) else "number"
        raise _of_another_version(f"{path} must be of type {names}, not {type(value).__name__}")
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Return name and type of each saved field: those that take part in comparisons."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.compare}


def to_text(values: dict[str, Any]) -> str:
    """Return JSON with one line per row of each table, for readers and for diffs."""
    parts = []
    for name, value in values.items():
        if isinstance(value, list) and value:
            rows = ",\n".join(f"    {_line(row)}" for row in value)
            parts.append(f"  {json.dumps(name)}: [\n{rows}\n  ]")
        else:
            parts.append(f"  {json.dumps(name)}: {_line(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _of_another_version(what: str) -> PlanError:
    return PlanError(f"not a plan of this version: {what}", fix="save the plan again with this version")


LEVELS = ("info", "warning", "error")


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A (virtual) stage. ``num_parameters``: elements of its full parameters, before sharding over tp."""

    index: int
    pp_rank: int
    chunk: int
    blocks: tuple[str, ...]
    num_parameters: int
    receives: tuple[BoundaryPlan, ...] = ()
    sends: tuple[BoundaryPlan, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """A note or warning for the user: ``what``, ``where`` (module and line), and how to ``fix`` it if possible."""

    level: str
    what: str
    where: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        require(self.level in LEVELS, f"a diagnostic has the unknown level {self.level}")


remark, warning = partial(Diagnostic, "info"), partial(Diagnostic, "warning")


@dataclass(frozen=True, slots=True)
class Summary:
    """Shares (0 to 1) of matrix-product FLOPs and of parameter elements that are sharded over tp; element count."""

    flops_sharded_fraction: float = 0.0
    parameters_sharded_fraction: float = 0.0
    num_parameters: int = 0


@dataclass(frozen=True, slots=True)
class LengthPlan:
    """One of several sequence lengths: ``sequences`` and ``microbatches`` of its step, ``memory`` of the fullest rank
    and bytes ``exchanged`` by one rank of each stage, predicted ``seconds`` (None without a cluster), and the hash of
    its own plan (``decisions``).
    """

    length: int
    sequences: int
    microbatches: int
    memory: int
    exchanged: int
    seconds: float | None
    decisions: str


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """An expert layer: ``num_experts``, ``top_k`` of them per token (0: experts choose tokens), and ``how`` tokens are
    dispatched.

    ``ranks``: for each ep rank of its stage, the ranks with its experts: num_experts / ep of them, from
    r · num_experts / ep on. Empty if experts are sharded like other layers. ``bytes``: sent by one rank to experts in
    one microbatch, and received back. ``sends``: the kind of payload.
    """

    block: str
    num_experts: int
    top_k: int
    how: str
    stage: int
    ranks: tuple[tuple[int, ...], ...] = ()
    bytes: int = 0
    sends: str = ""


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a plan, named by their JSON keys; ``spec`` is the spec as a dict."""

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
        """Return JSON values, with ``version`` first."""
        return {"version": VERSION, **encode(self)}

    def hash(self) -> str:
        """Return the SHA-256 of the decisions, which must be equal on all ranks of a run.

        It excludes estimates, diagnostics, and texts with file names, which may differ between machines.
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
