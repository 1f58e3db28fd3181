"""The plan of a run: of its model and spec, or a saved one that its ranks run without the model's code (``--plan``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from passes.errors import PlanError
from planner.capture.model.with_adapters import OPTION as OF_PEFT
from planner.frozen_plan import Plan
from planner.named_code import is_named
from planner.spec.spec import Spec
from planner.stored.plan_file import SAVED_BY, SUFFIX
from runtime.shared_plan import Planned, planned
from runtime.training.job import Job

OPTION = "--plan"
FRESH = (
    "MODEL has no weights: they are drawn as `initialization` of the spec says (without --plan the model's own code "
    "draws them)"
)


def plan_of(job: Job, spec: Spec, check: Callable[[nn.Module], None] | None = None) -> Planned:
    """The plan of a job, made here or by another process of the launch. ``check``: called with the model before it is
    captured. Raises PlanError."""
    if job.plan is not None:
        return Planned(stored_plan(job, spec), None)
    from planner.capture.model.reference import load_to_plan

    model = load_to_plan(job.model, spec.seed)
    if check is not None:
        check(model)
    return planned(model, spec, job.planned, job.timeout)


def stored_plan(job: Job, spec: Spec) -> Plan:
    """The saved plan of a job. Raises PlanError if it is of another spec, or an option needs the model itself."""
    assert job.plan is not None
    if not job.plan.endswith(SUFFIX):
        what = f"{job.plan} is no plan that runs: its name does not end in {SUFFIX}"
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
            raise PlanError(
                f"{option} runs the model itself, and a saved plan does not hold its code",
                where=OPTION,
                fix=f"leave out {option} or {OPTION}",
            )
    found = Plan.load(job.plan, own_functions=True)  # those of the spec, as is compared next
    if found.spec["optimizer"]["schedule"]["steps"] == "auto":
        what = "the plan has optimizer.schedule.steps: auto, which is replaced by the steps of a run when it plans"
        fix = f"write steps: {job.num_steps} in the spec and save the plan again, or leave out {OPTION}"
        raise PlanError(what, where=OPTION, fix=fix)
    lengths = {"lengths": list(spec.lengths[1:] and spec.lengths)}, {"lengths": [row.length for row in found.lengths]}
    for key, asked, had in (*differing(*lengths), *differing(spec.longest.to_dict(), found.spec)):
        raise PlanError(
            f"the plan was made with {key}: {had}, the spec has {asked}",
            where=job.plan,
            fix="save the plan again with this spec, or train with the spec of the plan",
        )
    return found


def differing(asked: Any, planned: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, value of the spec, value of the plan) of each difference. The plan may have a number for auto or none, and
    no name of a function."""
    if isinstance(asked, Mapping) and isinstance(planned, Mapping):
        for name in (*asked, *(n for n in planned if n not in asked)):
            yield from differing(asked.get(name), planned.get(name), f"{key}.{name}".lstrip("."))
    elif asked != planned and (asked not in ("auto", None) or is_named(planned)):
        yield key, asked, planned
