"""The weights that a command evaluates or continues texts with: of a save, of a directory, or initial ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from passes.errors import PlanError
from planner.capture.model.reference import load_to_plan, pretrained_directory
from planner.capture.model.with_adapters import adapter_directory
from planner.frozen_plan import Plan
from runtime.checkpoint.adapters_load import check_adapters
from runtime.checkpoint.pretrained_load import check_pretrained
from runtime.checkpoint.saves import check_average, look, resolve
from runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class Weights:
    """``load``: a save of training, or a directory of saves; ``averaged``: the running mean of its weights. Without it
    those of the model ``reference``, if that is a directory with weights."""

    reference: str
    load: str | None = None
    averaged: bool = False

    @property
    def directory(self) -> Path | None:
        """Of pretrained weights to read, if no save is loaded."""
        return pretrained_directory(self.reference) if self.load is None else None

    @property
    def adapters(self) -> Path | None:
        """A directory of trained adapters to load; a save of training has its own."""
        return adapter_directory(self.reference) if self.load is None else None

    def model(self, seed: int) -> nn.Module:
        """The model to plan, without drawn values if a save brings its own."""
        return load_to_plan(self.reference, seed, has_values=self.load is None)

    def check_load(self) -> None:
        """Raise PlanError if there is nothing to load."""
        if self.load is not None:
            save = resolve(Path(self.load))
            manifest = look(save)
            if self.averaged:
                check_average(save, manifest)
        elif self.averaged:
            what = "--ema selects the weights of a save, but --load is not given"
            raise PlanError(what, where="--ema", fix="add --load DIR")

    def check(self, decided: Plan) -> None:
        """Raise PlanError if files are not of the planned model."""
        if (directory := self.directory) is not None:
            check_pretrained(decided, directory)
        if (adapters := self.adapters) is not None:
            check_adapters(decided, adapters)

    def into(self, engine: Engine, *, leads: bool) -> None:
        """Load them. ``leads``: whether this rank speaks for all."""
        if self.load is not None:
            engine.load(self.load, averaged=self.averaged)
        elif (directory := self.directory) is not None:
            engine.load_pretrained(directory)
        elif leads:
            print(f"no --load: the weights are the initial ones of {self.reference}", file=sys.stderr, flush=True)
        if (adapters := self.adapters) is not None:
            engine.load_adapters(adapters)
