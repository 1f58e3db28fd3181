"""Options of a training run, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from passes.errors import PlanError
from planner.spec.spec import Spec
from runtime.checkpoint.saves import check_writable, resolve, saves_in
from runtime.report.step_row import StepRow

AUTO = "auto"
DEFAULT_SAVES = "checkpoints"
DEFAULT_TRACE = "trace.json"
GROUPS_TIMEOUT = 600.0  # seconds
# of one rank alone, or compared by content: the plan with its spec, the data
OWN = frozenset(
    [
        "model",
        "spec",
        "data",
        "mixture",
        "tokenizer",
        "keep",
        "compare",
        "log",
        "plot",
        "tensorboard",
        "callback",
        "wandb",
        "quiet",
        "profile_to",
        "timeout",
        "planned",
    ]
)
PLACES = ("save", "resume", "plan", "save_adapters", "save_merged")


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a run. ``stopped``: the signal that ended it before its last step. ``failure``: why it gave up."""

    rows: list[StepRow]
    stopped: int | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """The settings of a run; the same on every rank, except those of ``OWN``.

    ``num_steps``: of the whole training, those before a resume included. ``save``: the directory of the saves, None
    for none; ``save_every``: steps between two of them, None for one at the end alone; ``keep``: how many of the newest
    stay, None for all. ``resume``: "auto" for the newest good save of ``save``, else a save or a directory of saves.
    ``tokenizer``: a file that tokenizes the text of ``data``, None for its bytes or if ``data`` holds tokens already.
    ``validate_every``: steps between two validations, None for none. ``sample_every``: steps after which the model
    continues the texts ``sample_prompt``.
    ``log``, ``plot``: files for the figures of each step, and for a picture of the loss; ``tensorboard``: a directory.
    ``profile``: which steps, as ``runtime.profiling.window`` reads it; ``profile_to``: the file of the trace.
    ``quiet``: no line of a step is shown. ``audit``: steps between two audits, in place of the spec's; None for those.
    ``timeout``: seconds that a rank waits for others in an exchange.
    ``mixture``: several texts in place of ``data``, with the share of each. ``keep_best``: the save with the least
    validation loss stays; ``patience``: validations without a smaller one before the run ends, None for no such end.
    ``callback``: ``file.py:function``, which gets each row; ``wandb``: the project that rows go to. ``plan``: a saved
    plan that the ranks run in place of a capture; ``planned``: the file of the launcher's plan
    (``runtime.shared_plan``). ``save_adapters``, ``save_merged``: directories for the adapters of
    peft, and for the base with these merged, at the end. ``validation_data``: names and files of sets that every
    validation reads; ``metric``: ``file.py:function``, for further figures of these.
    """

    model: str
    spec: str
    data: str
    num_steps: int
    compare: bool = False
    log: str | None = None
    save: str | None = None
    save_every: int | None = None
    keep: int | None = None
    resume: str | None = None
    plot: str | None = None
    tensorboard: str | None = None
    tokenizer: str | None = None
    validate_every: int | None = None
    profile: str | None = None
    profile_to: str | None = None
    quiet: bool = False
    audit: int | None = None
    timeout: float = GROUPS_TIMEOUT
    mixture: tuple[tuple[str, float], ...] = ()
    keep_best: bool = False
    patience: int | None = None
    callback: str | None = None
    wandb: str | None = None
    plan: str | None = None
    planned: str | None = None
    save_adapters: str | None = None
    save_merged: str | None = None
    sample_every: int | None = None
    sample_prompt: tuple[str, ...] = ()
    validation_data: tuple[tuple[str, str], ...] = ()
    metric: str | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(source for source, _ in self.mixture) or (self.data,)

    @property
    def trace(self) -> str:
        return self.profile_to or DEFAULT_TRACE


def spec_of(job: Job) -> Spec:
    """The spec of the run: its file, and the options that replace keys of it."""
    spec = Spec.load(job.spec).of_run(job.num_steps)
    if job.audit is None:
        return spec
    return spec.model_copy(update={"audit": spec.audit.model_copy(update={"every": job.audit})})


def saves_directory(
    save: str | None, save_every: int | None, resume: str | None, keep_best: bool = False
) -> str | None:
    """The directory of saves: ``save``, or ``checkpoints`` if an option asks for saves without a directory."""
    return save or (DEFAULT_SAVES if save_every is not None or resume == AUTO or keep_best else None)


def check_saves(job: Job, *, goes_on: bool = False) -> None:
    """Raise PlanError for options that do not go together, and for a directory that cannot take this run's saves.

    ``goes_on``: the run has begun to save there, and its ranks were started again.
    """
    if job.keep is not None and job.save is None:
        raise PlanError("--keep limits the number of saves, but nothing is saved", where="--keep", fix="add --save DIR")
    if job.resume not in (None, AUTO):
        resolve(job.resume)
    if job.save is None:
        return
    check_writable(job.save)
    found = saves_in(job.save)
    if found and job.resume is None and not goes_on:
        raise PlanError(
            f"{job.save} has saves of an earlier run, the newest {found[-1].name}",
            where="--save",
            fix="add --resume auto to resume from it, or use another directory",
        )
