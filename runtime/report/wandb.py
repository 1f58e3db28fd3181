"""The figures of a run for Weights & Biases, under the names of the log. Needs the package ``wandb``."""

from __future__ import annotations

import dataclasses
from importlib import import_module

from runtime.report.step_row import StepRow


class WandB:
    """Owns a run of the project."""

    def __init__(self, project: str) -> None:
        self._run = import_module("wandb").init(project=project)

    def write(self, row: StepRow) -> None:
        figures = {name: value for name, value in dataclasses.asdict(row).items() if isinstance(value, int | float)}
        self._run.log({name: value for name, value in figures.items() if name != "step"}, step=row.step)

    def close(self) -> None:
        self._run.finish()
