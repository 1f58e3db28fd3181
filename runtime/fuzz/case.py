"""One case: a model, drawn or the user's own, a drawn spec, and how to read them back from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from torch import nn

from passes.errors import PlanError
from planner.files.atomic import write_for_user
from planner.files.json_text import read_json
from planner.files.text import shorten
from runtime.fuzz import fitting, specs
from runtime.fuzz.drawn import models
from runtime.fuzz.fields import Choices, Options, draw, simpler, told
from runtime.fuzz.fitting import Facts
from runtime.fuzz.own_model import OwnModel
from runtime.fuzz.spec_text import CONTINUED, ROWS, continued_on, spec_of

VERSION = 4
_FIX = "give a file written by `meshwright fuzz`"


@dataclass(frozen=True, slots=True)
class Case:
    """``model`` and ``spec``: an option for each field of ``models.FIELDS`` and ``specs.FIELDS``.

    ``own``: the user's model, in place of a drawn one; ``model`` is empty then.
    """

    model: Choices
    spec: Choices
    own: OwnModel | None = None

    @classmethod
    def drawn(cls, seed: int, most_ranks: int, own: OwnModel | None = None) -> Case:
        """A case of two ranks or more, if the spec leaves that free. Equal for equal seeds."""
        random = Random(seed)
        of_model, of_spec, axis = random.random(), random.random(), random.choice(specs.AXES)
        model = {} if own is not None else draw(models.FIELDS, seed, simplest=of_model)
        return cls(model, {}, own)._with_a_spec(seed, of_spec, axis, most_ranks)

    def another(self, seed: int, number: int, most_ranks: int) -> Case:
        """The ``number``-th further spec of ``seed`` for this model; it shares the fields that captures use."""
        name = f"{seed}.{number}"
        random, kept = Random(name), {field: self.spec[field] for field in specs.OF_CAPTURES}
        return self._with_a_spec(name, random.random(), random.choice(specs.AXES), most_ranks, kept)

    def _with_a_spec(
        self, seed: int | str, simplest: float, axis: str, most_ranks: int, kept: Choices | None = None
    ) -> Case:
        options = self.spec_options
        spec = draw(options, seed, simplest=simplest)
        for name, chance in specs.RARE.items():
            if Random(f"{seed}/rare {name}").random() < chance:
                spec[name] = options[name][0]
        spec |= kept or {}
        found = replace(self, spec=spec).sensible(most_ranks)
        if found.world_size > 1 or f"mesh.{axis}" in self.pinned:
            return found
        return replace(self, spec=spec | {f"mesh.{axis}": 2}).sensible(most_ranks)

    @property
    def spec_options(self) -> Options:
        return specs.FIELDS if self.own is None else self.own.options

    @property
    def pinned(self) -> Choices:
        return {} if self.own is None else self.own.pinned

    @property
    def facts(self) -> Facts:
        if self.own is not None:
            return self.own.facts
        blocks = self.model["layers"]
        return Facts(blocks * 2 if self.model["kind"] == "encoder_decoder" else blocks, self.model["experts"] != "none")

    def sensible(self, most_ranks: int) -> Case:
        return replace(self, spec=fitting.sensible(self.spec, most_ranks, self.facts, self.pinned))

    @property
    def world_size(self) -> int:
        return fitting.world_size(self.spec)

    def build(self) -> nn.Module:
        return models.build(self.model) if self.own is None else self.own.build(self.spec["seed"])

    def to_spec(self) -> dict[str, Any]:
        base = models.spec_part(self.model) if self.own is None else self.own.base
        return spec_of(self.spec, self.facts, base)

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
        found = [replace(self, model={name: models.FIELDS[name][0] for name in self.model})]
        found += [
            replace(self, spec=self.spec | {n: self.spec_options[n][0] for n in names}) for names in self._groups()
        ]
        found += [replace(self, model=model) for model in simpler(self.model, models.FIELDS)]
        found += [replace(self, spec=spec) for spec in simpler(self.spec, self.spec_options)]
        legal = [one.sensible(most_ranks) for one in found]
        return [one for one in legal if one != self]

    def _groups(self) -> list[list[str]]:
        """The fields of a spec except the mesh, section by section and together."""
        rest = [name for name in self.spec_options if not name.startswith("mesh.")]
        sections = dict.fromkeys(name.partition(".")[0] for name in rest if "." in name)
        return [rest, *([name for name in rest if name.startswith(f"{section}.")] for section in sections)]

    def __str__(self) -> str:
        model = told(self.model, models.FIELDS) if self.own is None else self.own.reference
        return f"model: {model}; spec: {told(self.spec, self.spec_options)}"

    def save(self, path: Path) -> None:
        """Raises OSError."""
        own = None if self.own is None else self.own.to_dict()
        values = {"version": VERSION, "model": self.model, "spec": self.spec, "own": own}
        write_for_user(path, json.dumps(values, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Case:
        """Raises PlanError for a file that ``save`` did not write."""
        values = read_json(path, "case", fix=_FIX)
        try:
            own = None if values["own"] is None else OwnModel(**values["own"])
            case = cls({} if own is not None else _listed(values["model"], models.FIELDS), {}, own)
            return replace(case, spec=_listed(values["spec"], case.spec_options))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise PlanError("this is not a case of this version", where=shorten(path), fix=_FIX) from None


def _listed(values: dict[str, Any], options: Options) -> Choices:
    """The options that were written. Raises ValueError if any is missing or unknown."""
    found = {name: tuple(v) if isinstance(v := values[name], list) else v for name in options}
    if values.keys() != options.keys() or any(found[name] not in options[name] for name in options):
        raise ValueError
    return found
