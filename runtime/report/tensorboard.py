"""The figures of a run for TensorBoard, under the names of the log. Needs the extra ``tensorboard``."""

from __future__ import annotations

import dataclasses

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
