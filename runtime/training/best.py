"""The least validation loss of a run: its save stays, and a run that finds no smaller one for long ends.

DIR/best/step-00000040      the save after step 40; an earlier one goes once this is written
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from passes.errors import PlanError
from runtime.checkpoint.saves import prune
from runtime.engine import Engine
from runtime.training.job import Job

DIRECTORY = "best"


class Best:
    """Owns the least loss, its step, and the number of validations since. All ranks see the same losses."""

    def __init__(self, engine: Engine, job: Job, extra: dict[str, Any]) -> None:
        """``extra``: stored in every save, not only in the best; it holds the best loss so far."""
        self._engine, self._job, self._extra = engine, job, extra
        self.loss, self.step, self.num_since = math.inf, 0, 0

    def go_on(self, saved: dict[str, Any]) -> None:
        """After a resume from a save with this ``extra``."""
        told = saved.get("best")
        if isinstance(told, dict) and all(
            isinstance(told.get(name), int | float) for name in ("loss", "step", "since")
        ):
            self.loss, self.step, self.num_since = float(told["loss"]), int(told["step"]), int(told["since"])
            self._tell()

    @property
    def is_over(self) -> bool:
        return self._job.patience is not None and self.num_since >= self._job.patience

    def see(self, loss: float | None) -> None:
        """The validation loss after a step, None if there was none."""
        if loss is None:
            return
        is_best = loss < self.loss
        if is_best:
            self.loss, self.step = loss, self._engine.step_index
        self.num_since = 0 if is_best else self.num_since + 1
        self._tell()
        if is_best and self._job.keep_best:
            self._save()
        if self.is_over:
            self._say(
                f"stopped after step {self._engine.step_index}: {self.num_since} validations without a lower "
                f"loss than {self.loss:.6f} after step {self.step}"
            )

    def _tell(self) -> None:
        if math.isfinite(self.loss) and (self._job.keep_best or self._job.patience is not None):
            self._extra["best"] = {"loss": self.loss, "step": self.step, "since": self.num_since}

    def _save(self) -> None:
        """As a save on the way: one that fails is a warning."""
        assert self._job.save is not None
        directory = Path(self._job.save) / DIRECTORY
        try:
            self._engine.save(directory, extra=self._extra)
        except PlanError as error:
            self._say(f"warning: the best step so far, {self.step}, is not saved: {error}")
            return
        if self._engine.groups.rank == 0:
            try:
                prune(directory, 1, self._engine.saver.line)
            except PlanError as error:
                self._say(f"warning: {error}")

    def _say(self, text: str) -> None:
        if self._engine.groups.rank == 0:
            print(text, file=sys.stderr, flush=True)


def check_best(job: Job) -> None:
    """Raise PlanError for options that need a validation if there is none."""
    for option, is_asked in (("--keep-best", job.keep_best), ("--patience", job.patience is not None)):
        if is_asked and job.validate_every is None:
            fix = "add --validate-every N, and --validation-data NAME=FILE"
            raise PlanError(f"{option} needs a validation loss, but nothing is validated", where=option, fix=fix)
