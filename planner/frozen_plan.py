"""The Plan: every decision as frozen tables, the same on every machine; saved, compared, hashed and printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from meshwright import __version__
from passes.errors import PlanError
from passes.pieces import CompiledPiece, Piece, Region
from planner.capture.model.hub_format import HubFormat
from planner.decisions import Decisions
from planner.files.atomic import write_for_user
from planner.files.named_code import is_named
from planner.files.text import MIB, read_json, shorten, writing
from planner.mesh import SIZES
from planner.report.sections import sections
from planner.report.text import sections_text
from planner.saved_plan.model import ModelOwner
from planner.saved_plan.plan_file import PARTS, SUFFIX, TO_WRITE, Stored, read, write
from planner.sharding.shards import Shards
from planner.spec.spec import Spec
from planner.tables.tables import VERSION, Tables, decode, to_text

if TYPE_CHECKING:
    from planner.cost.memory import MemoryRow
    from planner.trace.lowered import Lowered

_BY = "meshwright"  # in a saved plan: the version that wrote it
_AGAIN = "save the plan again with this version"
_MOST_BYTES = 64 * MIB  # ten times that of a model of 405 billion parameters on 16,384 GPUs


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Tables):
    """The work of every rank. Frozen; equal plans compare equal, fresh or loaded.

    Beside its tables, a fresh plan holds the fields that passes and runtime read: ``decisions`` (the captured program,
    its types and stages), ``shards`` (tensors, sums and exchanges of each rank), ``owner`` (of the user's model),
    ``regions`` (ops that CUDA graphs capture), ``recomputed`` (values that are freed and recomputed), ``pieces`` (ops
    that are compiled), ``flops`` (operations of a rank's step; None until they are counted for a ``.pt``) and
    ``shorter`` (plans of the other lengths).
    A plan saved as JSON has only the tables: once loaded, it prints, compares and hashes, but does not run. A plan
    saved as ``.pt`` has all fields, and runs without the model's code (planner.saved_plan).
    """

    decisions: Decisions | None = field(default=None, compare=False, repr=False)
    shards: Shards | None = field(default=None, compare=False, repr=False)
    owner: ModelOwner | None = field(default=None, compare=False, repr=False)
    regions: tuple[Region, ...] = field(default=(), compare=False, repr=False)
    recomputed: tuple[Piece, ...] = field(default=(), compare=False, repr=False)
    pieces: tuple[CompiledPiece, ...] = field(default=(), compare=False, repr=False)
    flops: float | None = field(default=None, compare=False, repr=False)
    shorter: tuple[Plan, ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def of(tables: Tables, lowered: Lowered | None = None, owner: ModelOwner | None = None) -> Plan:
        rows = {f.name: getattr(tables, f.name) for f in fields(Tables)}
        names = ("decisions", "shards", "regions", "recomputed", "pieces") if lowered is not None else ()
        return Plan(**rows, **{name: getattr(lowered, name) for name in names}, owner=owner)

    @property
    def of_all_lengths(self) -> tuple[Plan, ...]:
        """The plans of all lengths, in the order of ``lengths``; only this plan if there is one length."""
        return (*self.shorter, self)

    def at_length(self, length: int) -> Plan:
        """Return the plan of one of ``lengths``. Raises PlanError for another length, or a plan loaded from JSON."""
        known = [row.length for row in self.lengths]
        check_length(length, known)
        if len(self.of_all_lengths) < len(known):
            raise PlanError("a plan loaded from JSON has the tables of its longest length only", fix="plan again")
        return self.of_all_lengths[known.index(length)]

    def to_run(self) -> tuple[Decisions, Shards]:
        """Return the decisions and shards that a run needs. Raises PlanError for a plan loaded from JSON."""
        if self.decisions is None or self.shards is None:
            raise PlanError("a plan loaded from JSON does not run", fix="plan the model again, or save the plan as .pt")
        return self.decisions, self.shards

    def lowered(self) -> Lowered:
        """Return the stages, to trace and count them. Raises PlanError for a plan loaded from JSON."""
        from planner.trace.lowered import Lowered

        return Lowered(*self.to_run(), self.regions, self.recomputed, self.pieces)

    @property
    def model(self) -> nn.Module | None:
        """The user's model; None once no other code holds it."""
        return None if self.owner is None else self.owner.model

    @property
    def hub(self) -> HubFormat:
        return HubFormat() if self.owner is None else self.owner.hub

    def step_flops(self) -> float:
        """Return the FLOPs of a step on one rank. Raises PlanError for a plan loaded from JSON."""
        if self.cost is not None:
            return self.cost.flops
        if self.flops is not None:
            return self.flops
        from planner.cost.planned import PlannedSeconds  # ranks with a saved plan do not need it

        spec = Spec.load({**self.spec, "cluster": None})
        return PlannedSeconds(self.lowered(), spec).step_flops(self.schedule)

    def evaluation_memory(self) -> tuple[MemoryRow, ...]:
        """Return the bytes of one rank of each pp rank under ``Engine(plan, mode="evaluate")``: parameters, and one
        microbatch. ``memory`` has those of training. Raises PlanError for a plan loaded from JSON.
        """
        from planner.cost.evaluation import evaluation_memory  # ranks with a saved plan do not need it

        return evaluation_memory(self.lowered(), self.schedule)

    def __repr__(self) -> str:
        """Return one line: axes of more than one rank, schedule, and number of parameters."""
        sizes = {axis: getattr(self.mesh, axis) for axis in SIZES if axis != "etp"}
        axes = " · ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"
        return f"Plan({axes}; {self.schedule.kind}, {len(self.parameters)} parameters)"

    def describe(self, *, full: bool = False) -> str:
        """Return the tables as plain text, the same on every machine. ``full``: a row for every block."""
        return sections_text(sections(self, full=full))

    def why(self, name: str) -> str:
        """Return the cost of each style of sharding for a parameter (a dotted name, or a glob), as text.

        Raises PlanError if no parameter has the name, and for a plan loaded from JSON.
        """
        from planner.report.alternatives import why  # ranks with a saved plan do not need it

        return sections_text(why(self, self.to_run()[0], name))

    def _repr_html_(self) -> str:
        """Return the tables of ``describe`` for a notebook."""
        return f'<pre style="overflow-x: auto; white-space: pre">{escape(self.describe())}</pre>'

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan atomically: its tables as JSON, or all fields, ready to run, if the name ends in ``.pt``.

        Raises PlanError if the file cannot be written, and for a ``.pt`` of a graph with functions of your own.
        """
        if str(path).endswith(SUFFIX):
            write([plan._stored() for plan in self.of_all_lengths], Path(path))
            return
        text = to_text({_BY: __version__, **self.to_dict()})
        with writing("the plan", str(path), TO_WRITE):
            write_for_user(Path(path), text)

    @staticmethod
    def load(path: str | PathLike[str], *, own_functions: bool = False) -> Plan:
        """Load a plan that ``save`` wrote. Raises PlanError if it is missing, damaged or of another version.

        A plan from a ``.pt`` runs: ``Engine(Plan.load("plan.pt"))``. The same code, torch and Python must have saved
        it. ``own_functions``: allow its spec to name functions of yours, which a run imports; else they are refused.
        """
        if str(path).endswith(SUFFIX):
            stored = read(Path(path))
            try:
                *shorter, longest = (
                    replace(Plan.from_dict(s.tables), decisions=s.decisions, shards=s.shards, owner=s.owner, **s.parts)
                    for s in stored
                )
                longest.check_functions(own_functions)
            except PlanError as error:
                raise PlanError(error.what, where=shorten(path), fix=error.fix) from None
            return replace(longest, shorter=tuple(shorter))
        fix = "save one: meshwright plan MODEL SPEC --format json -o FILE"
        values = read_json(path, "plan", most_bytes=_MOST_BYTES, fix=fix, damaged="save the plan again")
        try:
            return Plan.from_dict(values)
        except PlanError as error:
            raise PlanError(error.what, where=str(path), fix=error.fix) from None

    def check_functions(self, are_allowed: bool) -> None:
        """Raise PlanError if a run would import a function that the spec in the file names, unless they are allowed."""
        spec = Spec.load({**self.spec, "cluster": None})
        for name, runs in ((spec.optimizer.schedule.kind, True), (spec.loss, spec.audit.every is not None)):
            if is_named(name) and runs and not are_allowed:
                what = f"the spec in the plan names a function that a run would import: {shorten(name)}"
                raise PlanError(what, fix="if you trust the file: Plan.load(path, own_functions=True)")

    def _stored(self) -> Stored:
        parts = {name: getattr(self, name) for name in PARTS} | {"flops": self.step_flops()}
        decisions, shards = self.to_run()
        assert self.owner is not None, "a plan with decisions has an owner"
        return Stored(self.to_dict(), decisions, shards, self.owner, parts)

    @staticmethod
    def from_dict(values: Any) -> Plan:
        """Return the plan of the values of ``to_dict``. Raises PlanError for other values."""
        if not isinstance(values, dict) or "version" not in values:
            raise PlanError("this is not a saved plan: it has no version", fix=_AGAIN)
        if values["version"] != VERSION:
            raise PlanError(
                f"the plan has version {shorten(values['version'], 40)}, this program reads version {VERSION}",
                fix=_AGAIN,
            )
        return Plan.of(
            decode(Tables, {name: value for name, value in values.items() if name not in ("version", _BY)}, "plan")
        )


def check_length(length: int, known: Sequence[int]) -> None:
    """Raise PlanError for a length that is not among the ``known`` lengths of a plan."""
    if length not in known:
        lengths = f"its lengths are {', '.join(map(str, known))}" if known else "it has one length"
        raise PlanError(f"the plan has no length {length}: {lengths}", where="--length", fix="name one of its lengths")
