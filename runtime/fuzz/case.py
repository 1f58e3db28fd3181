"""One drawn case: a model, a spec, and how to read it back from a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from torch import nn

from planner.errors import PlanError
from planner.files.atomic import write_for_user
from planner.files.json_text import read_json
from planner.files.text import shorten
from runtime.fuzz import models, specs
from runtime.fuzz.fields import Choices, draw, simpler, told

VERSION = 1
_OPTIONS = {
    **{f"model.{name}": v for name, v in models.FIELDS.items()},
    **{f"spec.{n}": v for n, v in specs.FIELDS.items()},
}


@dataclass(frozen=True, slots=True)
class Case:
    """``model`` and ``spec``: an option for each field of ``models.FIELDS`` and ``specs.FIELDS``."""

    model: Choices
    spec: Choices

    @classmethod
    def drawn(cls, seed: int, most_ranks: int) -> Case:
        """Equal for equal seeds."""
        random = Random(seed)
        model = draw(models.FIELDS, random, simplest=random.random())
        spec = draw(specs.FIELDS, random, simplest=random.random())
        if random.random() < 0.97:
            spec["compile"] = False  # takes minutes
        return cls(model, spec).sensible(most_ranks)

    def sensible(self, most_ranks: int) -> Case:
        has_experts, blocks = self.model["experts"] != "none", self.model["layers"]
        num_blocks = blocks * 2 if self.model["kind"] == "encoder_decoder" else blocks
        spec = specs.sensible(self.spec, most_ranks, has_experts=has_experts, num_blocks=num_blocks)
        return replace(self, spec=spec)

    @property
    def world_size(self) -> int:
        return specs.world_size(self.spec)

    def build(self) -> nn.Module:
        return models.build(self.model)

    def to_spec(self) -> dict[str, Any]:
        return specs.spec_of(self.spec, models.inputs_of(self.model))

    def simpler(self, most_ranks: int) -> list[Case]:
        """Every case that differs from this one by one simpler option."""
        flat = {**{f"model.{n}": v for n, v in self.model.items()}, **{f"spec.{n}": v for n, v in self.spec.items()}}
        found = [_of_flat(one) for one in simpler(flat, _OPTIONS)]
        legal = [one.sensible(most_ranks) for one in found]
        return [one for one in legal if one != self]

    def __str__(self) -> str:
        return f"model: {told(self.model, models.FIELDS)}; spec: {told(self.spec, specs.FIELDS)}"

    def save(self, path: Path) -> None:
        """Raises OSError."""
        write_for_user(path, json.dumps({"version": VERSION, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Case:
        """Raises PlanError for a file that ``save`` did not write."""
        fix = "give a file that `meshwright fuzz` wrote"
        values = read_json(path, "case", fix=fix)
        parts = [values.get(part) if isinstance(values, dict) else None for part in ("model", "spec")]
        model, spec = (_listed(part, o) for part, o in zip(parts, (models.FIELDS, specs.FIELDS), strict=True))
        if model is None or spec is None:
            raise PlanError("this is no case of this version", where=shorten(path), fix=fix)
        return cls(model, spec)


def _listed(values: Any, options: dict[str, tuple[Any, ...]]) -> Choices | None:
    """The options that were written; None where any is missing or unknown."""
    if not isinstance(values, dict) or values.keys() != options.keys():
        return None
    found = {name: tuple(v) if isinstance(v := values[name], list) else v for name in options}
    return found if all(found[name] in options[name] for name in options) else None


def _of_flat(flat: Choices) -> Case:
    parts: dict[str, Choices] = {"model": {}, "spec": {}}
    for name, value in flat.items():
        part, _, field = name.partition(".")
        parts[part][field] = value
    return Case(parts["model"], parts["spec"])
