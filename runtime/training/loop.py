"""The training loop of one rank."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

from torch import Tensor

from passes.errors import PlanError
from planner.capture.model.reference import pretrained_directory
from planner.capture.model.with_adapters import OPTION, adapter_directory
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.audit.audit import AuditError
from runtime.checkpoint.model_files import FOLDER, model_files, told_of, write_files
from runtime.data.prefetch import Prefetched
from runtime.data.stream import Stream
from runtime.data.token_batches import Batches, OwnRows
from runtime.distributed.devices import launched
from runtime.distributed.exchange_json import broadcast_json
from runtime.distributed.same_options import require_same_data, told_to_all
from runtime.distributed.stopping import Stopping, stop_requested
from runtime.engine import Engine
from runtime.profiling.profile import Profile
from runtime.profiling.window import Window
from runtime.report.step_report import StepReport
from runtime.shared_plan import Planned
from runtime.training.best import Best
from runtime.training.callback import Orders
from runtime.training.data import RunData, run_data
from runtime.training.job import Job, Trained, spec_of
from runtime.training.nonfinite import NonFiniteError, NonFiniteGuard
from runtime.training.planned import FRESH, plan_of
from runtime.training.samples import Samples
from runtime.training.saving import RunSaves
from runtime.training.showing import Seen, Showing
from runtime.training.validation import Metric, Validation, validate
from runtime.verify.reference import OneProcess, with_values

LR = "lr of the callback"  # in the extra data of a save: the rate in place of the schedule's
STREAM = "stream"  # its position, in the extra data of saves


class _Run:
    """One rank's run. Owns the reports that the device still works on.

    A GPU works on the next step while this one's figures come.
    """

    def __init__(
        self,
        engine: Engine,
        data: RunData,
        rows: OwnRows | Stream,
        showing: Showing,
        stopping: Stopping,
        saves: RunSaves,
        beside: OneProcess | None,
        profile: Profile | None,
    ) -> None:
        self.engine, self.data, self.showing, self.stopping, self.beside = engine, data, showing, stopping, beside
        self.saves, self.profile, self.rows = saves, profile, rows
        self.is_stopped = self.is_over = False
        self.validation: Validation | None = None
        self.failure: PlanError | None = None  # the same on every rank
        self._waiting: list[tuple[dict[str, Tensor], StepReport, Seen]] = []
        self._guard = NonFiniteGuard(engine)
        self._metric = None if showing.job.metric is None else Metric(showing.job.metric)
        self._lag = int(engine.groups.device.type != "cpu")

    def step(self, batch: dict[str, Tensor]) -> None:
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
        self.show(self._lag)

    def next_batch(self, batches: Batches) -> dict[str, Tensor] | None:
        """The batch of the next step; None behind the end of a stream. The same call on every rank."""
        step = self.engine.step_index
        with self.showing.pace.making_batch():
            if not isinstance(self.rows, Stream):
                return batches.batch(step)
            return self.rows.agreed(self.engine.groups, lambda: batches.batch(step))

    def _validated(self) -> Validation | None:
        """By the running mean of the weights if there is one. None after most steps. A metric that fails ends the run
        after this step, with a save."""
        if not self.data.is_validated_after(self.engine.step_index):
            return None
        with nullcontext() if self.engine.optimizer.average is None else self.engine.averaged_weights():
            try:
                return validate(self.data.held_out, self.engine, self._metric)
            except PlanError as error:
                if self._metric is None or error.where == "batch":
                    raise
                self.failure, self.is_over = error, True
                return None

    def finish(self) -> None:
        """After the last step."""
        self.show()
        if self.profile is not None:
            self.profile.finish()

    def show(self, lag: int = 0) -> None:
        """Shows the steps except the last ``lag``. Sets ``is_stopped`` on all ranks if one was asked to stop."""
        while len(self._waiting) > lag:
            batch, report, seen = self._waiting.pop(0)
            self.is_stopped |= self.stopping.agreed(report)
            if report.has_orders:  # first: what the callback asks for at this step is for the next one
                self._obey()
            self.showing.step(report, seen)
            if self.showing.failure is not None:
                self.stopping.request()
            self._guard.check(batch, report, seen.step - 1, local=self.rows.is_local)

    def _obey(self) -> None:
        """The orders of rank 0, at the same step on every rank."""
        leads = self.engine.groups.rank == 0
        orders = broadcast_json(self.engine.groups, self.showing.run.orders() if leads else None, Orders.of_json)
        self.is_over |= orders.stop
        self.saves.is_asked |= orders.save
        if orders.changes_lr:
            self.saves.extra[LR] = orders.lr
            self.engine.set_learning_rate(orders.lr)


def run_rank(job: Job, made: Planned | None = None) -> Trained:
    """The training of one rank. Rank 0 shows progress, writes the log and returns the rows; the others none.
    ``made``: the plan, if this process has it.

    After a restart by the launcher it resumes from the last save of the run itself. SIGTERM or Ctrl-C of any
    rank ends it after a complete step, with a save if the job has saves.
    """
    with told_to_all():
        spec = spec_of(job)
        weights = pretrained_directory(job.model)
        leads = not launched(os.environ).rank
        made = made or plan_of(job, spec)
        decided, model = made.plan, made.model
        alone = with_values(model, job.model, decided, spec) if model is not None and job.compare and leads else None
        made.model = model = None
        data = run_data(job, spec, decided)
        _say("\n".join(data.told), leads=leads)
        showing, samples = Showing(job, decided, leads=leads), Samples(job, spec, decided, leads=leads)
        profile = _profile_of(job, decided, spec, leads=leads)
        engine = Engine(decided, timeout_seconds=job.timeout)
    with engine, RunSaves(engine, job, data.identity) as saves:
        made.forget_file()
        require_same_data(str(data.identity["data"]), engine.groups)
        if leads and job.save is not None:
            write_files(model_files(job.model.partition(OPTION)[0], job.sources), Path(job.save, FOLDER))
        save, best = saves.resumed(), Best(engine, job, data.identity)
        best.go_on(saves.taken)
        if isinstance(rate := saves.taken.get(LR), float):
            saves.extra[LR] = rate
            engine.set_learning_rate(rate)
        if save is None and weights is not None:
            engine.load_pretrained(weights)
        if save is None and (trained := adapter_directory(job.model)) is not None:
            engine.load_adapters(trained)
        if save is None and weights is None and job.plan is not None:
            _say(FRESH, leads=leads)
        # after the engine has taken its weights: the one process trains the model itself
        one = None if alone is None else OneProcess(alone, spec, None, decided.parameters)
        beside = None if one is None or data.training is None else _caught_up(one, data.training, engine.step_index)
        if profile is not None:
            profile.attach(engine)
        with showing.from_step(engine.step_index), Stopping() as stopping:
            rows = _rows_of(job, spec, data, engine, saves)
            run = _Run(engine, data, rows, showing, stopping, saves, beside, profile)
            ahead = Prefetched(run.rows, engine.step_index, job.num_steps)
            try:
                with ahead as batches:
                    while engine.step_index < job.num_steps and not (run.is_stopped or run.is_over or best.is_over):
                        if (batch := run.next_batch(batches)) is None:
                            _say(f"{job.data} has ended: training ends after step {engine.step_index}", leads=leads)
                            break
                        run.step(batch)
                        samples.after_step(engine)
                        best.see(None if run.validation is None else run.validation.loss)
                        saves.after_step()
                run.finish()
            except (NonFiniteError, AuditError) as error:  # of all ranks at the same step
                return Trained(showing.rows, failure=str(error))
            stopped = stop_requested() or signal.SIGTERM if run.is_stopped else None
            saves.finish()
            if job.save_adapters is not None:
                engine.save_adapters(job.save_adapters)
            if job.save_merged is not None:
                engine.save_merged(job.save_merged)
            if leads:
                _write_files(job)
    if (failure := showing.failure or run.failure) is not None:
        raise failure
    return Trained(showing.rows, stopped)


def _rows_of(job: Job, spec: Spec, data: RunData, engine: Engine, saves: RunSaves) -> OwnRows | Stream:
    """The rows of this rank. Raises PlanError for a stream that cannot go on where the save of a resume is."""
    if data.training is not None:
        return OwnRows(data.training, engine.layout)
    stream = Stream(job.data, spec, engine.layout, keeps=job.save is not None)
    stream.go_on(saves.taken.get(STREAM))
    _say(stream.told, leads=engine.groups.rank == 0)
    saves.position = lambda: {STREAM: stream.saved(engine.groups, engine.step_index)}
    return stream


def _say(text: str, *, leads: bool) -> None:
    if leads and text:
        print(text, file=sys.stderr, flush=True)


def _write_files(job: Job) -> None:
    """Tokenizer and configs, into every directory that the run has written."""
    files = model_files(job.model.partition(OPTION)[0], job.sources)
    for directory in filter(None, (job.save_adapters, job.save_merged)):
        write_files(files, Path(directory))
        _say(told_of(files, directory), leads=True)


def _profile_of(job: Job, decided: Plan, spec: Spec, *, leads: bool) -> Profile | None:
    if job.profile is None:
        return None
    return Profile(Window.parse(job.profile, job.num_steps), job.trace, decided, spec.cluster, leads=leads)


def _caught_up(beside: OneProcess, batches: Batches, num_steps: int) -> OneProcess:
    """The single process has no saves: it makes the steps before a resume again."""
    for step in range(num_steps):
        beside.train_step(batches.batch(step))
    return beside
