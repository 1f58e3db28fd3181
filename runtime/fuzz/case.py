"""One case: a model and a drawn spec, which can be saved to a file and loaded.

For the user's own model, the keys in the spec are kept, and all others are drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol

from torch import nn

from passes.errors import PlanError
from planner import plan
from planner.capture.model.reference import load_model
from planner.files.atomic import write_for_user
from planner.files.text import read_json, shorten
from planner.spec.fields import AUTO
from planner.spec.lines import read_yaml
from planner.spec.spec import Spec
from runtime.fuzz import specs
from runtime.fuzz.forks import in_fork
from runtime.fuzz.specs import Choices, Facts, Options

VERSION = 5
_FIX = "give a file that the same command wrote"
_NO_PART = ("cluster", "devices", "data")  # keys that do not change a step
_OF_DRAWN_MODELS = {
    "tensor_parallel.overrides": ("none",),
    "optimizer.groups": ("none",),
    "recompute": ("none", "full", "selective"),
    "blocks recomputed": ("all",),
}
CAPTURE_SECONDS = 3600.0


class Model(Protocol):
    """The model of a case. ``options``: of each field of its specs; ``pinned``: fields with a fixed value; ``base``:
    fixed keys of the spec.
    """

    @property
    def options(self) -> Options: ...
    @property
    def pinned(self) -> Choices: ...
    @property
    def facts(self) -> Facts: ...
    @property
    def base(self) -> dict[str, Any]: ...
    def build(self, seed: int) -> nn.Module: ...
    def simpler(self) -> list[Model]:
        """Return the simplest model, then all with one simpler option; none if the model has no options."""
        ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and a spec as an option for each field of ``specs.FIELDS``."""

    model: Model
    spec: Choices

    @classmethod
    def drawn(cls, seed: int, most_ranks: int, model: Model) -> Case:
        """Return a case of two or more ranks, if the spec allows it. Equal seeds draw equal cases."""
        random = Random(seed)
        random.random()  # the first number may have drawn the model
        return cls(model, {})._with_a_spec(seed, random.random(), random.choice(specs.AXES), most_ranks)

    def another(self, seed: int, number: int, most_ranks: int) -> Case:
        """Return a further case of ``seed`` for this model, which shares the fields on which captures depend."""
        name = f"{seed}.{number}"
        random, kept = Random(name), {field: self.spec[field] for field in specs.OF_CAPTURES}
        return self._with_a_spec(name, random.random(), random.choice(specs.AXES), most_ranks, kept)

    def _with_a_spec(
        self, seed: int | str, simplest: float, axis: str, most_ranks: int, kept: Choices | None = None
    ) -> Case:
        options = self.model.options
        spec = specs.draw(options, seed, simplest=simplest)
        for name, chance in specs.RARE.items():
            if Random(f"{seed}/rare {name}").random() < chance:
                spec[name] = options[name][0]
        spec |= kept or {}
        case = replace(self, spec=spec).sensible(most_ranks)
        if case.world_size > 1 or f"mesh.{axis}" in self.model.pinned:
            return case
        return replace(self, spec=spec | {f"mesh.{axis}": 2}).sensible(most_ranks)

    def sensible(self, most_ranks: int) -> Case:
        return replace(self, spec=specs.sensible(self.spec, most_ranks, self.model.facts, self.model.pinned))

    @property
    def world_size(self) -> int:
        return specs.world_size(self.spec)

    def build(self) -> nn.Module:
        return self.model.build(self.spec["seed"])

    def to_spec(self) -> dict[str, Any]:
        return specs.spec_of(self.spec, self.model.facts, self.model.base)

    @property
    def is_local(self) -> bool:
        """Whether each rank gets only the rows of its dp rank."""
        return self.spec[specs.ROWS] == "own"

    def continued(self) -> dict[str, Any] | None:
        """Return the spec of the layout that resumes from a save of this case, if there is one."""
        axis = self.spec[specs.CONTINUED]
        return None if axis == "nothing" else specs.continued_on(self.to_spec(), axis)

    def simpler(self, most_ranks: int) -> list[Case]:
        """Return cases with the simplest model or sections of the spec, then all with one simpler option."""
        options, models = self.model.options, self.model.simpler()
        cases = [replace(self, model=model) for model in models[:1]]
        cases += [replace(self, spec=self.spec | {n: options[n][0] for n in names}) for names in self._groups()]
        cases += [replace(self, model=model) for model in models[1:]]
        cases += [replace(self, spec=spec) for spec in specs.simpler(self.spec, options)]
        return [case for case in (each.sensible(most_ranks) for each in cases) if case != self]

    def _groups(self) -> list[list[str]]:
        """Return the fields of a spec except the mesh, all together and by section."""
        rest = [name for name in self.model.options if not name.startswith("mesh.")]
        sections = dict.fromkeys(name.partition(".")[0] for name in rest if "." in name)
        return [rest, *([name for name in rest if name.startswith(f"{section}.")] for section in sections)]

    def __str__(self) -> str:
        return f"model: {self.model}; spec: {specs.told(self.spec, self.model.options)}"

    def save(self, path: Path) -> None:
        """Write the case to ``path``. Raises OSError."""
        values = {"version": VERSION, "model": self.model.to_dict(), "spec": self.spec}
        write_for_user(path, json.dumps(values, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path, read: Callable[[dict[str, Any]], Model]) -> Case:
        """Load a case. ``read``: makes a model of its ``to_dict``. Raises PlanError for a file of another form."""
        values = read_json(path, "case", fix=_FIX)
        try:
            model = read(values["model"])
            return cls(model, specs.listed(values["spec"], model.options))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise PlanError("this is not a case of this version", where=shorten(path), fix=_FIX) from None


@dataclass(frozen=True, slots=True)
class OwnModel:
    """The user's model: ``reference`` is MODEL of the command line, ``base`` the spec's values except ``auto``."""

    reference: str
    base: dict[str, Any]
    num_blocks: int
    has_experts: bool

    @classmethod
    def read(cls, reference: str, spec: Path, most_ranks: int) -> OwnModel:
        """Load model and spec. Raises PlanError for a wrong spec, for nothing left to draw, or a failed capture."""
        checked = Spec.load(spec, {"mesh": AUTO})
        checked.require_inputs()
        values, _ = read_yaml(spec)
        base = {name: value for name, value in _without_auto(values).items() if name not in _NO_PART}
        own = cls(reference, base, 1, False)
        _check_axes(checked, own, most_ranks)
        num_blocks, has_experts = in_fork(_captured, own, timeout_seconds=CAPTURE_SECONDS)
        return cls(reference, base, num_blocks, has_experts)

    @property
    def facts(self) -> Facts:
        return Facts(self.num_blocks, self.has_experts, self.base["batch"]["global"])

    @property
    def pinned(self) -> Choices:
        """The fields in the spec."""
        values = {name: value for name in specs.FIELDS if (value := _at(self.base, name)) is not None}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}

    @property
    def options(self) -> dict[str, tuple[Any, ...]]:
        pinned = self.pinned
        drawn = specs.FIELDS | _OF_DRAWN_MODELS | {"microbatches": (None,)}
        return {name: (pinned[name],) if name in pinned else values for name, values in drawn.items()}

    def build(self, seed: int) -> nn.Module:
        return load_model(self.reference, materialize=True, seed=seed)

    def simpler(self) -> list[Model]:
        return []

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return self.reference


def _captured(own: OwnModel) -> tuple[int, bool]:
    """Return the number of blocks of the model, and whether it has expert layers."""
    alone = {name: own.base[name] for name in ("inputs", "loss") if name in own.base}
    micro = own.base["batch"].get("micro", 1)
    batch = {"global": own.base["batch"]["global"], "micro": micro}
    decided = plan(own.build(seed=1234), {"mesh": {}, "batch": batch, **alone})
    return sum(len(stage.blocks) for stage in decided.stages), bool(decided.experts)


def _check_axes(spec: Spec, own: OwnModel, most_ranks: int) -> None:
    pinned = own.pinned
    axes = {f"mesh.{axis}": pinned.get(f"mesh.{axis}", 1) for axis in specs.AXES}
    if specs.world_size(axes) > most_ranks:
        what = f"the spec's mesh has {specs.world_size(axes)} ranks, but a case has at most {most_ranks}"
        raise spec.error("mesh", what, f"give --nproc {specs.world_size(axes)}, or reduce the mesh")
    if all(f"mesh.{axis}" in pinned for axis in specs.AXES):
        what = f"the spec sets {', '.join(axes)}: no layout remains to draw"
        raise spec.error("mesh", what, "remove one of them, or set it to auto; `meshwright verify` runs one layout")


def _without_auto(values: Any) -> dict[str, Any]:
    """Return the values without ``auto``, which is drawn like a missing key."""
    kept = {name: value for name, value in values.items() if value != AUTO}
    return {name: _without_auto(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _at(values: dict[str, Any], name: str) -> Any:
    value: Any = values
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
