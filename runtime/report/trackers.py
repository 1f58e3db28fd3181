"""The figures of a run for TensorBoard and Weights & Biases, under the names of the log: optional packages."""

from __future__ import annotations

import dataclasses
from importlib import import_module

from runtime.report.step_row import StepRow


class TensorBoard:
    """Owns the writer of a directory. Of an earlier run there, steps after ``first`` are made again, and purged."""

    def __init__(self, directory: str, first: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory, purge_step=first + 1 if first else None)

    def write(self, row: StepRow) -> None:
        for name, value in dataclasses.asdict(row).items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, row.step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Owns a run of the project."""

    def __init__(self, project: str) -> None:
        self._run = import_module("wandb").init(project=project)

    def write(self, row: StepRow) -> None:
        figures = {name: value for name, value in dataclasses.asdict(row).items() if isinstance(value, int | float)}
        self._run.log({name: value for name, value in figures.items() if name != "step"}, step=row.step)

    def close(self) -> None:
        self._run.finish()
