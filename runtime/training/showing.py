"""Output of rank 0, at each step and at the end of a run. Other ranks print nothing.

``--callback FILE.py:FUNCTION``: a user's function that gets the row of each step, on rank 0.

    function(row)         reads the row
    function(row, run)    may also call ``run.stop()``, ``run.set_lr(x)``, ``run.save()``, ``run.log(name, value)``

Only rank 0 knows these orders: the sum of the next update announces them, and rank 0 then sends them to all ranks.
"""

import math
import sys
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from passes.errors import PlanError, refusing
from planner.files.named_code import NamedCode, line_of
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.distributed.groups import Groups
from runtime.distributed.stopping import announce_orders
from runtime.engine.engine import Engine
from runtime.engine.prompts import codec_of, fitted, tokens_of
from runtime.report.log import Log, Pace, Planned, Seen, StepRow, TensorBoard, WandB, draw_curve, make_row, rows_until
from runtime.report.progress import Progress, Sink
from runtime.report.step_report import StepReport
from runtime.training.job import Job
from runtime.training.validation import tokenizer_of

FORMS = (
    "FILE.py:FUNCTION, a function of the row of a step (loss, validation_loss, step …) and, if it takes two arguments, "
    "of the run (stop, set_lr, save, log)"
)


class Showing:
    """The display of a run: its rows, the progress line, and the outputs of figures. ``leads``: this is rank 0.

    ``failure``: the error of the callback or of an output, such as a full disk. Afterwards no row is shown; training
    stops with a save, and raises it. Every rank creates it before the engine of ``plan``.
    """

    def __init__(self, job: Job, plan: Plan, *, leads: bool) -> None:
        self.job, self.leads = job, leads
        self.rows: list[StepRow] = []
        self.failure: PlanError | None = None
        self.pace = Pace(job.num_steps)
        self._planned = [Planned.of(each) for each in plan.of_all_lengths] if leads else []
        self._first, self._run_id, self._spec = 0, None, plan.spec
        self._before: list[StepRow] = []
        self._imbalance: float | None = plan.spec.get("experts", {}).get("imbalance")
        self._ep = plan.mesh.ep
        self._stack = ExitStack()
        self._callback = Callback(job.callback) if leads and job.callback is not None else None
        self.run = Run(job.num_steps, has_saves=job.save is not None, is_compared=job.compare)

    def from_step(self, step: int, run_id: str | None) -> Self:
        """Begin after the ``step`` steps of an earlier run, and keep their rows in the log. ``run_id``: the run of
        Weights & Biases to continue."""
        self._first, self._run_id = step, run_id
        return self

    def __enter__(self) -> Self:
        if self.leads:
            self._before = rows_until(self.job.log, self._first)
        self._progress = self._stack.enter_context(
            Progress(
                self.job.num_steps,
                self._sinks() if self.leads else (),
                first=self._first,
                every_step=self.job.compare,
                quiet=self.job.quiet or not self.leads,
            )
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        if self.leads and self.job.plot is not None and (rows := [*self._before, *self.rows]):
            draw_curve(rows, self.job.plot)
            print(f"loss curve: {self.job.plot}", file=sys.stderr, flush=True)

    def step(self, report: StepReport, seen: Seen, groups: Groups) -> None:
        if not self.leads:
            return
        self._warn_of_imbalance(report, seen.step)
        row = make_row(report, self._planned[seen.place], seen, self.pace.seconds_left(seen.step))
        self.rows.append(row)
        own = {} if seen.validation is None else dict(seen.validation.figures)
        if self.failure is None:
            try:
                if self._callback is not None:
                    with groups.in_users_code():
                        self._callback(row, self.run)
                self._progress.show(row, own | self.run.figures())
            except PlanError as error:
                self.failure = error

    def _warn_of_imbalance(self, report: StepReport, step: int) -> None:
        """Warn of each new maximum of imbalance above the planned one, for which the plan's memory is too small."""
        if self._imbalance is None or not report.expert_tokens:
            return
        imbalance = report.imbalance_of_ranks(self._ep)
        if imbalance > self._imbalance:
            self._imbalance = math.ceil(imbalance * 10) / 10
            warnings.warn(
                f"step {step}: the fullest rank of ep had {imbalance:.2f} times the mean rows of experts, more than "
                f"planned; set experts.imbalance: {self._imbalance}, so that the plan predicts its memory",
                stacklevel=2,
            )

    def _sinks(self) -> list[Sink]:
        sinks: list[Sink] = []
        if self.job.log is not None:
            sinks.append(Log(self.job.log, self._first))
        if self.job.tensorboard is not None:
            sinks.append(TensorBoard(self.job.tensorboard, self._first))
        if self.job.wandb is not None:
            config = {"model": self.job.model, "data": self.job.data, "steps": self.job.num_steps, "spec": self._spec}
            name = None if self.job.save is None else Path(self.job.save).name
            sinks.append(WandB(self.job.wandb, name, config, self._run_id))
        return sinks


class Samples:
    """The prompts of ``--sample-prompt``. ``leads``: this rank prints. Raises PlanError for prompts that do not fit."""

    def __init__(self, job: Job, spec: Spec, decided: Plan, *, leads: bool) -> None:
        self._every, self._texts, self._leads = job.sample_every, job.sample_prompt, leads
        check_samples(job, spec)
        if self._texts:
            self._codec = codec_of(tokenizer_of(job, "--sample-prompt"))
            self._tokens, self._count = tokens_of(self._texts, self._codec, spec, decided)

    def after_step(self, engine: Engine) -> None:
        """Print continuations of the prompts if they are due. All ranks must call it."""
        if self._every is None or engine.step_index % self._every:
            return
        continued = engine.generate(self._tokens, self._count, stop=self._codec.ends)
        for text, tokens in zip(self._texts, continued.tokens, strict=True) if self._leads else ():
            written = f"{text}{self._codec.text(tokens.tolist())}"
            print(f"step {engine.step_index} continues: {written}", file=sys.stderr, flush=True)


def check_samples(job: Job, spec: Spec) -> None:
    """Raise PlanError for prompts that fit no plan of ``spec``, or an option without its counterpart."""
    if (job.sample_every is None) != (not job.sample_prompt):
        missing = "--sample-prompt TEXT" if job.sample_every is not None else "--sample-every N"
        what = "--sample-every and --sample-prompt need each other"
        raise PlanError(what, where="--sample-every", fix=f"add {missing}")
    if job.sample_prompt:
        fitted(job.sample_prompt, codec_of(tokenizer_of(job, "--sample-prompt")), spec)


@dataclass
class Orders:
    """Orders of a callback. With ``changes_lr``, ``lr`` is the new learning rate; None returns to the schedule."""

    stop: bool = False
    save: bool = False
    changes_lr: bool = False
    lr: float | None = None


class Run:
    """The run, for a callback. All ranks carry out its orders after the next step, on a GPU one step later; after the
    last step, only ``log`` has an effect.
    """

    def __init__(self, num_steps: int, *, has_saves: bool, is_compared: bool) -> None:
        self.num_steps = num_steps
        self._has_saves, self._is_compared = has_saves, is_compared
        self._orders, self._figures = Orders(), dict[str, float]()

    def stop(self) -> None:
        """End the training as after its last step, with a save if the run has saves."""
        self._orders.stop = True
        announce_orders(True)

    def save(self) -> None:
        if not self._has_saves:
            raise ValueError("run.save() needs a directory: add --save DIR")
        self._orders.save = True
        announce_orders(True)

    def set_lr(self, lr: float | None) -> None:
        """Set the learning rate from the next step on; None returns to the schedule. Saves keep it."""
        if lr is not None and not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"run.set_lr({lr}): a learning rate is a finite number, 0 or more")
        if self._is_compared:
            raise ValueError("run.set_lr: the one process of --compare follows the schedule; remove --compare")
        self._orders.changes_lr, self._orders.lr = True, None if lr is None else float(lr)
        announce_orders(True)

    def log(self, name: str, value: float) -> None:
        """Add a figure of this step to the log, TensorBoard and Weights & Biases."""
        if name in StepRow.__dataclass_fields__:
            raise ValueError(f"run.log({name!r}): every row already has a figure of this name")
        self._figures[str(name)] = float(value)

    def orders(self) -> Orders:
        """Return the orders so far, and clear them."""
        orders, self._orders = self._orders, Orders()
        announce_orders(False)
        return orders

    def figures(self) -> dict[str, float]:
        """Return the figures of this step, and clear them."""
        figures, self._figures = self._figures, {}
        return figures


class Callback:
    """The user's callback. Its exceptions become a PlanError with file and line, which ends all ranks.

    Raises PlanError if the file of ``reference`` fails, or lacks the function.
    """

    def __init__(self, reference: str) -> None:
        self._function, num_arguments = NamedCode(reference, "--callback", FORMS).function(2, 1)
        self._takes_run = num_arguments == 2

    def __call__(self, row: StepRow, run: Run) -> None:
        what, fix = f"the callback failed after step {row.step}", "correct it, or remove --callback"
        with refusing(what, where=lambda error: line_of(error) or "--callback", fix=fix, of=(Exception,)):
            self._function(row, run) if self._takes_run else self._function(row)
