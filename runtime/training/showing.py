"""Output of rank 0, step by step and at the end of a run. Other ranks print nothing."""

from __future__ import annotations

import math
import sys
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from passes.errors import PlanError
from planner.frozen_plan import Plan
from runtime.report.curve import draw_curve
from runtime.report.log import Log, rows_until
from runtime.report.pace import Pace, Planned
from runtime.report.progress import Progress, Sink
from runtime.report.step_report import StepReport
from runtime.report.step_row import StepRow, make_row
from runtime.report.trackers import TensorBoard, WandB
from runtime.training.callback import Callback, Run
from runtime.training.job import Job
from runtime.training.validation import Validation


@dataclass(frozen=True, slots=True)
class Seen:
    """The figures of rank 0 besides the engine's report of a step. ``step``: its number, from 1.

    ``one_process_loss``: of the single process, if it runs; ``validation``: after the step, if due. ``place``: of
    the batch's length among those of the plan.
    """

    step: int
    one_process_loss: float | None
    data_seconds: float
    validation: Validation | None
    place: int = -1


class Showing:
    """Owns the rows of the run, the progress line, and the files that figures go to.

    ``failure``: why they could not be written, as on a full disk; no row is shown afterwards. Training then stops as
    if asked to, with a save, and ends with it.
    """

    def __init__(self, job: Job, plan: Plan, *, leads: bool) -> None:
        """Before an engine is made of ``plan``. ``leads``: this is rank 0."""
        self.job, self.leads = job, leads
        self.rows: list[StepRow] = []
        self.failure: PlanError | None = None
        self.pace = Pace(job.num_steps)
        self._planned = [Planned.of(each) for each in plan.of_all_lengths] if leads else []
        self._first = 0
        self._before: list[StepRow] = []
        self._imbalance: float | None = plan.spec.get("experts", {}).get("imbalance")
        self._ep = plan.mesh.ep
        self._stack = ExitStack()
        self._callback = Callback(job.callback) if leads and job.callback is not None else None
        self.run = Run(job.num_steps, has_saves=job.save is not None, is_compared=job.compare)

    def from_step(self, step: int) -> Self:
        """An earlier run made ``step`` steps: the display begins there, and the log keeps their rows."""
        self._first = step
        return self

    def __enter__(self) -> Self:
        if self.leads:
            self._before = rows_until(self.job.log, self._first)
        self._progress = self._stack.enter_context(
            Progress(
                self.job.num_steps,
                self._sinks() if self.leads else (),
                first=self._first,
                enabled=self.leads,
                every_step=self.job.compare,
                quiet=self.job.quiet,
            )
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        if self.leads and self.job.plot is not None and (rows := [*self._before, *self.rows]):
            draw_curve(rows, self.job.plot)
            print(f"loss curve: {self.job.plot}", file=sys.stderr, flush=True)

    def step(self, report: StepReport, seen: Seen) -> None:
        if not self.leads:
            return
        self._warn_of_imbalance(report, seen.step)
        row = make_row(
            seen.step,
            report,
            self._planned[seen.place],
            one_process_loss=seen.one_process_loss,
            data_seconds=seen.data_seconds,
            seconds_left=self.pace.seconds_left(seen.step),
            validation_loss=None if seen.validation is None else seen.validation.loss,
        )
        self.rows.append(row)
        own = {} if seen.validation is None else dict(seen.validation.figures)
        if self.failure is None:
            try:
                if self._callback is not None:
                    self._callback(row, self.run)
                self._progress.show(row, own | self.run.figures())
            except PlanError as error:
                self.failure = error

    def _warn_of_imbalance(self, report: StepReport, step: int) -> None:
        """Once for each value that is larger: the plan's memory is that of fewer rows."""
        if self._imbalance is None or not report.expert_tokens:
            return
        found = report.imbalance_of_ranks(self._ep)
        if found > self._imbalance:
            self._imbalance = math.ceil(found * 10) / 10
            warnings.warn(
                f"step {step}: the fullest rank of ep had {found:.2f} times the mean rows of experts, more than "
                f"planned; set experts.imbalance: {self._imbalance}, so that the plan predicts its memory",
                stacklevel=2,
            )

    def _sinks(self) -> list[Sink]:
        found: list[Sink] = []
        if self.job.log is not None:
            found.append(Log(self.job.log, self._first))
        if self.job.tensorboard is not None:
            found.append(TensorBoard(self.job.tensorboard, self._first))
        if self.job.wandb is not None:
            found.append(WandB(self.job.wandb))
        return found
