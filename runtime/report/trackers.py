"""The figures of a run for TensorBoard and Weights & Biases, under the names of the log: optional packages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib import import_module

from runtime.report.step_row import StepRow


class TensorBoard:
    """Owns the writer of a directory. Of an earlier run there, steps after ``first`` are made again, and purged."""

    def __init__(self, directory: str, first: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(directory, purge_step=first + 1 if first else None)

    def write(self, row: StepRow, own: Mapping[str, float]) -> None:
        for name, value in _figures(row, own).items():
            self._writer.add_scalar(name, value, row.step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Owns a run of the project."""

    def __init__(self, project: str) -> None:
        self._run = import_module("wandb").init(project=project)

    def write(self, row: StepRow, own: Mapping[str, float]) -> None:
        self._run.log(_figures(row, own), step=row.step)

    def close(self) -> None:
        self._run.finish()


def _figures(row: StepRow, own: Mapping[str, float]) -> dict[str, float]:
    found = {name: value for name, value in dataclasses.asdict(row).items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in found.items() if name != "step"} | dict(own)
