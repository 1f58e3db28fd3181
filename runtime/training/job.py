"""The settings of a training run, checked before it starts, and its plan: made from model and spec, or loaded."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from passes.errors import PlanError
from planner.capture.model.reference import OPTION as OF_PEFT
from planner.files.named_code import is_named
from planner.frozen_plan import Plan
from planner.saved_plan.plan_file import SAVED_BY, SUFFIX
from planner.spec.spec import Spec
from runtime.checkpoint.saves import check_writable, resolve, saves_in
from runtime.report.log import StepRow
from runtime.shared_plan import Planned, planned
from runtime.training.options import AUTO, OF_ONE_RANK, PLACE, TrainOptions

DEFAULT_TRACE = "trace.json"
OPTION = "--plan"
_OWN = {"mark": OF_ONE_RANK}
FRESH = (
    "MODEL has no weights: they are drawn by `initialization` of the spec (without --plan, the model's own code draws "
    "them)"
)


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a run. ``stopped``: the signal that ended it early. ``failure``: the reason if it failed."""

    rows: list[StepRow]
    stopped: int | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Job(TrainOptions):
    """The settings of a run, the same on every rank, except those in ``OWN``.

    ``num_steps``: of the whole training, including steps before a resume. ``mixture``: several texts with their shares,
    instead of ``data``. ``planned``: the file of the launcher's plan (``runtime.shared_plan``). ``sample_prompt``:
    texts that the model continues; ``validation_data``: names and files of the sets of each validation.
    """

    model: str = field(metadata=_OWN)
    spec: str = field(metadata=_OWN)
    data: str = field(metadata=_OWN)
    num_steps: int
    mixture: tuple[tuple[str, float], ...] = field(default=(), metadata=_OWN)
    planned: str | None = field(default=None, metadata=_OWN)
    sample_prompt: tuple[str, ...] = ()
    validation_data: tuple[tuple[str, str], ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(source for source, _ in self.mixture) or (self.data,)

    @property
    def trace(self) -> str:
        return self.profile_to or DEFAULT_TRACE


def _marked(mark: str) -> frozenset[str]:
    return frozenset(each.name for each in fields(Job) if each.metadata.get("mark") == mark)


OWN, PLACES = _marked(OF_ONE_RANK), _marked(PLACE)


def spec_of(job: Job) -> Spec:
    """Return the spec of the run, with the keys that options replace."""
    spec = Spec.load(job.spec).of_run(job.num_steps)
    if job.audit is None:
        return spec
    return spec.model_copy(update={"audit": spec.audit.model_copy(update={"every": job.audit})})


def check_saves(job: Job, *, goes_on: bool = False) -> None:
    """Raise PlanError for conflicting options, and for a directory that cannot be used for this run's saves.

    ``goes_on``: the run has already saved there, and its ranks were restarted.
    """
    if job.keep is not None and job.save is None:
        raise PlanError("--keep limits the number of saves, but nothing is saved", where="--keep", fix="add --save DIR")
    if job.resume not in (None, AUTO):
        resolve(job.resume)
    if job.save is None:
        return
    check_writable(job.save)
    saves = saves_in(job.save)
    if saves and job.resume is None and not goes_on:
        what = f"{job.save} has saves of an earlier run, the newest {saves[-1].name}"
        raise PlanError(what, where="--save", fix="add --resume auto to resume from it, or use another directory")


def plan_of(job: Job, spec: Spec, check: Callable[[nn.Module], object] | None = None) -> Planned:
    """Return the plan of a job: loaded, made here, or made by another process of the launch. ``check``: called with the
    model before its capture."""
    if job.plan is not None:
        return Planned(stored_plan(job, spec), None)
    from planner.capture.model.reference import load_to_plan

    model = load_to_plan(job.model, spec.seed)
    if check is not None:
        check(model)
    return planned(model, spec, job.planned, job.timeout)


def stored_plan(job: Job, spec: Spec) -> Plan:
    """Load the saved plan of a job. Raises PlanError if the spec differs, or an option needs the model itself."""
    assert job.plan is not None
    if not job.plan.endswith(SUFFIX):
        what = f"{job.plan} is not a plan that can run: its name does not end in {SUFFIX}"
        raise PlanError(what, where=OPTION, fix=SAVED_BY)
    if OF_PEFT in job.model:
        what, fix = (
            "a saved plan does not hold the modules of peft",
            f"leave out {OPTION}: ranks then plan by themselves",
        )
        raise PlanError(what, where=OPTION, fix=fix)
    audit = "--audit" if job.audit is not None else "audit of the spec"
    for option, is_set in (("--compare", job.compare), (audit, spec.audit.every is not None)):
        if is_set:
            what = f"{option} runs the model itself, but a saved plan does not contain its code"
            raise PlanError(what, where=OPTION, fix=f"leave out {option} or {OPTION}")
    stored = Plan.load(job.plan, own_functions=True)  # its spec is compared with the user's next
    if stored.spec["optimizer"]["schedule"]["steps"] == "auto":
        what = "the plan was saved with optimizer.schedule.steps: auto, so that it lacks the number of steps"
        fix = f"write steps: {job.num_steps} in the spec and save the plan again, or leave out {OPTION}"
        raise PlanError(what, where=OPTION, fix=fix)
    lengths = {"lengths": list(spec.lengths[1:] and spec.lengths)}, {"lengths": [row.length for row in stored.lengths]}
    for key, wanted, had in (*differing(*lengths), *differing(spec.longest.to_dict(), stored.spec)):
        fix = "save the plan again with this spec, or train with the spec of the plan"
        raise PlanError(f"the plan was made with {key}: {had}, but the spec has {wanted}", where=job.plan, fix=fix)
    return stored


def differing(wanted: Any, planned: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value of the spec, value of the plan) of each difference, except keys that planning fills in (auto or
    null in the spec). A function that only the plan names is a difference."""
    if isinstance(wanted, Mapping) and isinstance(planned, Mapping):
        for name in (*wanted, *(n for n in planned if n not in wanted)):
            yield from differing(wanted.get(name), planned.get(name), f"{key}.{name}".lstrip("."))
    elif wanted != planned and (wanted not in ("auto", None) or is_named(planned)):
        yield key, wanted, planned
