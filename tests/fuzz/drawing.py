"""Models that are drawn, as the model of a case; the command of ``python -m tests.fuzz``."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from runtime.fuzz import specs
from runtime.fuzz.campaign import SPECS_OF_A_MODEL, Campaign
from runtime.fuzz.case import Case, Model
from runtime.fuzz.specs import Choices, Facts, Options, draw, listed, simpler, told
from tests.fuzz.drawn import models

COMMAND = "python -m tests.fuzz"


@dataclass(frozen=True, slots=True)
class DrawnModel:
    """``chosen``: an option for each field of ``models.FIELDS``."""

    chosen: Choices

    @property
    def options(self) -> Options:
        return specs.FIELDS

    @property
    def pinned(self) -> Choices:
        return {}

    @property
    def facts(self) -> Facts:
        layers = self.chosen["layers"]
        num_blocks = layers * 2 if self.chosen["kind"] == "encoder_decoder" else layers
        is_steady = self.chosen["routing"] == "steady"
        return Facts(num_blocks, self.chosen["experts"] != "none", is_steady=is_steady)

    @property
    def base(self) -> dict[str, Any]:
        return models.spec_part(self.chosen)

    def build(self, seed: int) -> models.Drawn:
        """Its weights do not depend on ``seed``."""
        return models.build(self.chosen)

    def simpler(self) -> list[Model]:
        simplest = DrawnModel({name: models.FIELDS[name][0] for name in self.chosen})
        return [simplest, *(DrawnModel(chosen) for chosen in simpler(self.chosen, models.FIELDS))]

    def to_dict(self) -> dict[str, Any]:
        return dict(self.chosen)

    def __str__(self) -> str:
        return told(self.chosen, models.FIELDS)


def drawn_model(seed: int) -> DrawnModel:
    """Equal for equal seeds."""
    return DrawnModel(draw(models.FIELDS, seed, simplest=Random(seed).random()))


def drawn_case(seed: int, most_ranks: int) -> Case:
    """The first case of ``seed``."""
    return Case.drawn(seed, most_ranks, drawn_model(seed))


def case_with(model: Choices, spec: Choices) -> Case:
    """The simplest case but for these options."""
    simplest = {name: values[0] for name, values in models.FIELDS.items()}
    return Case(DrawnModel(simplest | model), {name: values[0] for name, values in specs.FIELDS.items()} | spec)


def read_case(path: Path) -> Case:
    """Raises PlanError for a file of anything else."""
    return Case.load(path, lambda values: DrawnModel(listed(values, models.FIELDS)))


def campaign_of(
    seed: int, most_ranks: int, folder: Path, say: Callable[[str], None] = print, num_specs: int = SPECS_OF_A_MODEL
) -> Campaign:
    """Of drawn models."""
    return Campaign(seed, most_ranks, folder, say, drawn_model, num_specs)
