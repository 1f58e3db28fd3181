"""One case: a model and a drawn spec, and how to read them back from a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol

from torch import nn

from passes.errors import PlanError
from planner.files.atomic import write_for_user
from planner.files.json_text import read_json
from planner.files.text import shorten
from runtime.fuzz import fitting, specs
from runtime.fuzz.fields import Choices, Options, draw, listed, simpler, told
from runtime.fuzz.fitting import Facts
from runtime.fuzz.spec_text import CONTINUED, ROWS, continued_on, spec_of

VERSION = 5
_FIX = "give a file that the same command wrote"


class Model(Protocol):
    """The model of a case. ``options``: of each field of its specs; ``pinned``: fields that stay; ``base``: keys of
    the spec that are given.
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
        """The simplest one, then every one with one simpler option; none if the model has no options."""
        ...

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Case:
    """``spec``: an option for each field of ``specs.FIELDS``."""

    model: Model
    spec: Choices

    @classmethod
    def drawn(cls, seed: int, most_ranks: int, model: Model) -> Case:
        """A case of two ranks or more, if the spec leaves that free. Equal for equal seeds."""
        random = Random(seed)
        random.random()  # a model may have been drawn by the first number
        return cls(model, {})._with_a_spec(seed, random.random(), random.choice(specs.AXES), most_ranks)

    def another(self, seed: int, number: int, most_ranks: int) -> Case:
        """The ``number``-th further spec of ``seed`` for this model; it shares the fields that captures use."""
        name = f"{seed}.{number}"
        random, kept = Random(name), {field: self.spec[field] for field in specs.OF_CAPTURES}
        return self._with_a_spec(name, random.random(), random.choice(specs.AXES), most_ranks, kept)

    def _with_a_spec(
        self, seed: int | str, simplest: float, axis: str, most_ranks: int, kept: Choices | None = None
    ) -> Case:
        options = self.model.options
        spec = draw(options, seed, simplest=simplest)
        for name, chance in specs.RARE.items():
            if Random(f"{seed}/rare {name}").random() < chance:
                spec[name] = options[name][0]
        spec |= kept or {}
        found = replace(self, spec=spec).sensible(most_ranks)
        if found.world_size > 1 or f"mesh.{axis}" in self.model.pinned:
            return found
        return replace(self, spec=spec | {f"mesh.{axis}": 2}).sensible(most_ranks)

    def sensible(self, most_ranks: int) -> Case:
        return replace(self, spec=fitting.sensible(self.spec, most_ranks, self.model.facts, self.model.pinned))

    @property
    def world_size(self) -> int:
        return fitting.world_size(self.spec)

    def build(self) -> nn.Module:
        return self.model.build(self.spec["seed"])

    def to_spec(self) -> dict[str, Any]:
        return spec_of(self.spec, self.model.facts, self.model.base)

    @property
    def is_local(self) -> bool:
        """Whether each rank is given the rows of its dp rank alone."""
        return self.spec[ROWS] == "own"

    def continued(self) -> dict[str, Any] | None:
        """The spec of the layout that resumes from a save of this one."""
        axis = self.spec[CONTINUED]
        return None if axis == "nothing" else continued_on(self.to_spec(), axis)

    def simpler(self, most_ranks: int) -> list[Case]:
        """The model or the spec as simple as can be, then every case that differs by one simpler option."""
        options, models = self.model.options, self.model.simpler()
        found = [replace(self, model=model) for model in models[:1]]
        found += [replace(self, spec=self.spec | {n: options[n][0] for n in names}) for names in self._groups()]
        found += [replace(self, model=model) for model in models[1:]]
        found += [replace(self, spec=spec) for spec in simpler(self.spec, options)]
        legal = [one.sensible(most_ranks) for one in found]
        return [one for one in legal if one != self]

    def _groups(self) -> list[list[str]]:
        """The fields of a spec except the mesh, section by section and together."""
        rest = [name for name in self.model.options if not name.startswith("mesh.")]
        sections = dict.fromkeys(name.partition(".")[0] for name in rest if "." in name)
        return [rest, *([name for name in rest if name.startswith(f"{section}.")] for section in sections)]

    def __str__(self) -> str:
        return f"model: {self.model}; spec: {told(self.spec, self.model.options)}"

    def save(self, path: Path) -> None:
        """Raises OSError."""
        values = {"version": VERSION, "model": self.model.to_dict(), "spec": self.spec}
        write_for_user(path, json.dumps(values, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path, read: Callable[[dict[str, Any]], Model]) -> Case:
        """``read``: a model from its ``to_dict``. Raises PlanError for a file that ``save`` did not write."""
        values = read_json(path, "case", fix=_FIX)
        try:
            model = read(values["model"])
            return cls(model, listed(values["spec"], model.options))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise PlanError("this is not a case of this version", where=shorten(path), fix=_FIX) from None
