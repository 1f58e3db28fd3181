"""The training loop of one rank."""

import os
import secrets
import signal
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from passes.errors import PlanError
from planner.capture.model.reference import OPTION, adapter_directory, pretrained_directory
from planner.files.text import shorten
from planner.spec.spec import Spec
from runtime.audit.audit import AuditError
from runtime.checkpoint.model_files import FOLDER, keep_files, model_files, told_of, write_files
from runtime.data.stream import Stream
from runtime.data.token_batches import Batches, OwnRows, Prefetched
from runtime.distributed.agreement import broadcast_json, of_kind
from runtime.distributed.devices import launched
from runtime.distributed.same_options import require_same, told_to_all
from runtime.distributed.stopping import Stopping, stop_requested
from runtime.engine.engine import Engine
from runtime.profiling.profile import Profile, Window
from runtime.report.log import Seen, Validation
from runtime.report.step_report import StepReport
from runtime.shared_plan import Planned
from runtime.training.data import RunData, run_data
from runtime.training.job import FRESH, Job, Trained, plan_of, spec_of
from runtime.training.saving import RunSaves, say
from runtime.training.showing import Orders, Samples, Showing
from runtime.training.validation import Best, Metric, TextMetric, metric_of, validate
from runtime.verify.batches import ignored_apart
from runtime.verify.reference import OneProcess, with_values

# keys of the extra data of saves
LR = "lr of the callback"  # the learning rate that a callback has set
RUN_ID = "run of Weights & Biases"
STREAM = "stream"  # its position
MOST_SKIPPED = 100  # maximum of consecutive skipped steps with `precision.nonfinite: skip`


@dataclass
class _Run:
    """One rank's run. Owns the reports of steps that the device has not finished.

    A GPU runs the next step while the host waits for the figures of this one. ``failure``: the same on every rank.
    """

    engine: Engine
    data: RunData
    rows: OwnRows | Stream
    showing: Showing
    stopping: Stopping
    saves: RunSaves
    beside: OneProcess | None
    profile: Profile | None
    metric: Metric | TextMetric | None
    is_stopped: bool = False
    is_over: bool = False
    validation: Validation | None = None
    failure: PlanError | None = None

    def __post_init__(self) -> None:
        self._waiting: list[tuple[dict[str, Tensor], StepReport, Seen]] = []
        self._guard = NonFiniteGuard(self.engine)
        self._lag = int(self.engine.groups.device.type != "cpu")

    def steps(self, job: Job, samples: Samples, best: Best) -> None:
        """Run the remaining steps, until the last one or a reason to end earlier."""
        with Prefetched(self.rows, self.engine.step_index, job.num_steps) as batches:
            while self.engine.step_index < job.num_steps and not (self.is_stopped or self.is_over or best.is_over):
                if (batch := self._next_batch(batches)) is None:
                    line = f"{job.data} has ended: training ends after step {self.engine.step_index}"
                    say(line, leads=self.engine.groups.rank == 0)
                    break
                self._step(batch)
                samples.after_step(self.engine)
                best.see(None if self.validation is None else self.validation.loss)
                self.saves.after_step()
        self._show()
        if self.profile is not None:
            self.profile.finish()

    def _step(self, batch: dict[str, Tensor]) -> None:
        if self.profile is not None:
            self.profile.before_step(self.engine.step_index + 1)
        report = self.engine.train_step(batch, local=self.rows.is_local)
        if self.profile is not None:
            self.profile.after_step(self.engine.step_index)
        alone = None
        if self.beside is not None and self.data.training is not None:
            alone = self.beside.train_step(self.data.training.batch(self.engine.step_index - 1))
        self.validation = self._validated()
        place = self.engine.place_of(batch)
        seen = Seen(self.engine.step_index, alone, self.showing.pace.data_seconds, self.validation, place)
        self._waiting.append((batch, report, seen))
        self._show(self._lag)

    def _next_batch(self, batches: Batches) -> dict[str, Tensor] | None:
        """Return the batch of the next step, None at the end of a stream. All ranks must call it."""
        step = self.engine.step_index
        with self.showing.pace.making_batch():
            if not isinstance(self.rows, Stream):
                return batches.batch(step)
            return self.rows.agreed(self.engine.groups, lambda: batches.batch(step))

    def _validated(self) -> Validation | None:
        """Return the validation after this step, by the running mean of the weights, if any; None if none is due. A
        metric that fails ends the run after this step, with a save."""
        every = self.data.validate_every
        if every is None or self.engine.step_index % every:
            return None
        with nullcontext() if self.engine.optimizer.average is None else self.engine.averaged_weights():
            try:
                return validate(self.data.held_out, self.engine, self.metric)
            except PlanError as error:
                if self.metric is None or error.where == "batch":
                    raise
                self.failure, self.is_over = error, True
                return None

    def _show(self, lag: int = 0) -> None:
        """Show the waiting steps except the last ``lag``. Sets ``is_stopped`` on all ranks if one was asked to stop."""
        while len(self._waiting) > lag:
            batch, report, seen = self._waiting.pop(0)
            self.is_stopped |= self.stopping.agreed(report)
            if report.has_orders:  # before the callback of this step, which gives orders for the next one
                self._obey()
            self.showing.step(report, seen, self.engine.groups)
            if self.showing.failure is not None:
                self.stopping.request()
            self._guard.check(batch, report, seen.step - 1, local=self.rows.is_local)

    def _obey(self) -> None:
        """Apply the orders of rank 0, at the same step on every rank."""
        leads = self.engine.groups.rank == 0
        orders = broadcast_json(self.engine.groups, self.showing.run.orders() if leads else None, of_kind(Orders))
        if orders.stop:
            self.is_over = True
            say(f"stopped after step {self.engine.step_index} by the callback", leads=leads)
        self.saves.is_asked |= orders.save
        if orders.changes_lr:
            self.saves.extra[LR] = orders.lr
            self.engine.set_learning_rate(orders.lr)


def run_rank(job: Job, own: Planned | None = None) -> Trained:
    """Train on one rank. Rank 0 shows progress, writes the log and returns the rows; the others return none.

    ``own``: the plan, if this process made it. After a restart by the launcher, training resumes from the run's last
    save. SIGTERM or Ctrl-C on any rank ends it after a complete step, with a save if the job has saves.
    """
    with told_to_all():
        spec, leads = spec_of(job), not launched(os.environ).rank
        own = own or plan_of(job, spec)
        decided, model = own.plan, own.model
        alone = with_values(model, job.model, decided, spec) if model is not None and job.compare and leads else None
        own.model = model = None
        data = run_data(job, spec, decided)
        say("\n".join(data.told), leads=leads)
        showing, samples = Showing(job, decided, leads=leads), Samples(job, spec, decided, leads=leads)
        profile, metric = None, metric_of(job, spec, decided)
        if job.profile is not None:
            window = Window.parse(job.profile, job.num_steps)
            profile = Profile(window, job.trace, decided, spec.cluster, leads=leads)
        engine = Engine(decided, timeout_seconds=job.timeout)
    with engine, RunSaves(engine, job, data.identity) as saves:
        own.forget_file()
        require_same("the data (by content)", str(data.identity["data"]), engine.groups)
        if leads and job.save is not None:
            engine.saver.model_files = keep_files(_files_of(job), Path(job.save, FOLDER))
        best = Best(engine, job, data.identity)
        _take_weights(engine, job, saves, best)
        # after the engine has copied the weights: the one process trains the model itself
        beside = None if alone is None else OneProcess(alone, spec, None, decided.parameters, ignored_apart(decided))
        if beside is not None and data.training is not None:
            for step in range(engine.step_index):  # it has no saves, and repeats the steps before a resume
                beside.train_step(data.training.batch(step))
        if profile is not None:
            profile.attach(engine)
        if run_id := saves.taken.get(RUN_ID) or (job.wandb and secrets.token_hex(4)):
            saves.extra[RUN_ID] = run_id
        with showing.from_step(engine.step_index, run_id), Stopping() as stopping:
            rows = _rows_of(job, spec, data, engine, saves)
            run = _Run(
                engine, data, rows, showing, stopping, saves=saves, beside=beside, profile=profile, metric=metric
            )
            try:
                run.steps(job, samples, best)
            except (NonFiniteError, AuditError) as error:  # on all ranks at the same step
                return Trained(showing.rows, failure=str(error))
            stopped = stop_requested() or signal.SIGTERM if run.is_stopped else None
            saves.finish()
            _write_models(job, engine)
    if (failure := showing.failure or run.failure) is not None:
        raise failure
    return Trained(showing.rows, stopped)


def _take_weights(engine: Engine, job: Job, saves: RunSaves, best: Best) -> None:
    """Load the state of the save from which the run resumes, else the weights of MODEL and its adapters."""
    save, weights = saves.resumed(), pretrained_directory(job.model)
    best.go_on(saves.taken)
    if isinstance(rate := saves.taken.get(LR), float):
        saves.extra[LR] = rate
        engine.set_learning_rate(rate)
    if save is not None:
        return
    if weights is not None:
        engine.load_pretrained(weights)
    if (trained := adapter_directory(job.model)) is not None:
        engine.load_adapters(trained)
    if weights is None and job.plan is not None:
        say(FRESH, leads=engine.groups.rank == 0)


def _rows_of(job: Job, spec: Spec, data: RunData, engine: Engine, saves: RunSaves) -> OwnRows | Stream:
    """Return the rows of this rank. Raises PlanError for a stream that cannot continue at the position of the save."""
    if data.training is not None:
        return OwnRows(data.training, engine.layout)
    stream = Stream(job.data, spec, engine.layout, keeps=job.save is not None)
    stream.go_on(saves.taken.get(STREAM))
    say(stream.told, leads=engine.groups.rank == 0)
    saves.position = lambda: {STREAM: stream.saved(engine.groups, engine.step_index)}
    return stream


def _write_models(job: Job, engine: Engine) -> None:
    """Write the directories of adapters and of the merged model, with tokenizer and configs beside the weights."""
    if job.save_adapters is not None:
        engine.save_adapters(job.save_adapters)
    if job.save_merged is not None:
        engine.save_merged(job.save_merged)
    directories = {"adapters": job.save_adapters, "merged model": job.save_merged}
    if engine.groups.rank == 0 and any(directories.values()):
        files = _files_of(job)
        for what, directory in directories.items():
            if directory is not None:
                write_files(files, Path(directory))
                say(f"wrote the {what} to {shorten(directory)}", leads=True)
                say(told_of(files, directory), leads=True)


def _files_of(job: Job) -> dict[str, bytes]:
    return model_files(job.model.partition(OPTION)[0], job.sources)


class NonFiniteError(RuntimeError):
    """Training cannot continue: the loss or gradients of a step are NaN or Inf. Raised on every rank."""


class NonFiniteGuard:
    """Checks each report for NaN and Inf. Owns the number of consecutive skipped steps.

    Every rank checks every step in order, so that all of them stop at the same step.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.num_skipped = engine, 0

    def check(self, batch: Mapping[str, Tensor], report: StepReport, step: int, *, local: bool = False) -> None:
        """Raise NonFiniteError on every rank, with the first non-finite value, if training cannot continue.

        ``batch`` and ``report``: of the step with index ``step``, from 0.
        """
        self.num_skipped = self.num_skipped + 1 if report.skipped else 0
        if self.num_skipped and self._is_over():
            raise NonFiniteError(self._words(batch, report, step, local))

    def _is_over(self) -> bool:
        """Return whether training ends. A dynamic loss scale expects such steps, until it cannot be halved further."""
        precision, scale = self.engine.spec.precision, self.engine.loss_scale
        if precision.loss_scale == "dynamic":
            return scale.is_exhausted or precision.nonfinite == "stop"
        return precision.nonfinite != "skip" or self.num_skipped >= MOST_SKIPPED

    def _words(self, batch: Mapping[str, Tensor], report: StepReport, step: int, local: bool) -> str:
        first = self.engine.find_nonfinite(batch, local=local, step=step)
        row = f" for {self.num_skipped} steps in a row" if self.num_skipped > 1 else ""
        figures = f"loss {report.loss:g}, gradient norm {report.grad_norm:g}"
        place = first or "in a rerun, every value is finite: the step is not reproducible, or a sum overflowed"
        return (
            f"step {step + 1} has NaN or Inf{row} ({figures}); its update was skipped, and training stops\n  "
            f"{place}\n  fix: lower the learning rate, warm up, or clip; see docs/limits.md; set "
            "precision.nonfinite to continue after such steps"
        )
