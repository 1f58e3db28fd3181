"""The section ``optimizer.schedule``: kinds of learning-rate schedules, the keys of each, and your own function."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from passes.errors import PlanError, SpecError, Where, refusing
from passes.program.source_lines import where_of_definition
from planner.files.named_code import FUNCTION_FORMS, NamedCode, is_named, line_of
from planner.spec.fields import Auto, Count, Fraction, NotNegative, Positive, Section, Size, Word, beside_the_spec, key
from planner.spec.messages import no_choice, not_read, wrong

# kind of schedule → the keys that may stand beside it
SCHEDULES: dict[str, tuple[str, ...]] = {
    "constant": ("warmup", "steps", "min_lr"),  # not read, and allowed: the keys of a decay may stay
    "cosine": ("warmup", "steps", "min_lr"),
    "linear": ("warmup", "steps", "min_lr"),
    "polynomial": ("warmup", "steps", "min_lr", "power"),
    "wsd": ("warmup", "steps", "min_lr", "decay"),
    "inverse_root": ("warmup", "min_lr"),
}
_DECAY = {"steps": ("its last step", 10000), "decay": ("the number of its steps", 1000)}  # why needed, an example
_OWN_SCHEDULE: tuple[str, ...] = ()  # a function of the user's has the step alone
_KINDS = {"anyOf": [{"enum": list(SCHEDULES)}, {"type": "string", "pattern": ".:."}]}
KIND_KEY = "optimizer.schedule.kind"


def _kind(value: Any) -> str:
    if isinstance(value, str) and (value in SCHEDULES or is_named(value)):
        return value
    raise no_choice(value, SCHEDULES, f"; or name a function of the step: {FUNCTION_FORMS}")


ScheduleKind = Annotated[str, BeforeValidator(_kind), beside_the_spec(KIND_KEY), WithJsonSchema(_KINDS)]


class LearningRateSpec(Section):
    kind: ScheduleKind = key(
        "constant",
        "after the warm-up: constant | cosine | linear | polynomial | wsd | inverse_root; or your own function of the "
        "step, from 0, that returns a factor of lr: path/file.py:function",
    )
    warmup: Count | Fraction = key(0, "steps of linear warm-up from 0 to lr; or their share of steps: 0.03")
    steps: Size | Annotated[Auto, Word] | None = key(
        None,
        "last step of the decay; required for cosine, linear, polynomial and wsd; auto: the last step of "
        "`meshwright train`",
    )
    min_lr: NotNegative = key(0.0, "learning rate after the decay")
    decay: Size | None = key(
        None, "for wsd: steps of the linear decay, the last ones of steps; before it, lr is stable"
    )
    power: Positive = key(1.0, "for polynomial: exponent of the decay")

    def of_run(self, num_steps: int) -> LearningRateSpec:
        """Return the schedule with numbers of steps for a run of ``num_steps``."""
        steps = num_steps if self.steps == "auto" else self.steps
        warmup = round(self.warmup * (steps or 0)) if isinstance(self.warmup, float) else self.warmup
        return self.model_copy(update={"steps": steps, "warmup": warmup})

    def problems(self) -> Iterator[PlanError]:
        at = "optimizer.schedule"
        read = SCHEDULES.get(self.kind, _OWN_SCHEDULE)
        yield from self._keys_of_others(read)
        for name, (what, count) in _DECAY.items() if self.kind != "constant" else ():
            if name in read and getattr(self, name) is None:
                what = f"{at}.{name} is missing: a {self.kind} decay needs {what}"
                yield SpecError(what, where=at, fix=f"add `{name}: {count}`")
        if self.kind == "inverse_root" and not self.warmup:
            what = f"{at}.warmup = 0: inverse_root decays as sqrt(warmup / step)"
            yield SpecError(what, where=at, fix="add `warmup: 1000`")
        yield from self._too_long(at)

    def _keys_of_others(self, read: tuple[str, ...]) -> Iterator[PlanError]:
        for name, field in type(self).model_fields.items():
            if name not in ("kind", *read) and getattr(self, name) != field.default:
                kind = self.kind if self.kind in SCHEDULES else "a function of your own"
                yield not_read(f"optimizer.schedule.{name}", kind)

    def _too_long(self, at: str) -> Iterator[PlanError]:
        if isinstance(self.warmup, float) and self.steps is None:
            what = f" = {self.warmup} is a share of steps, which are missing"
            yield wrong(f"{at}.warmup", what, "add `steps: auto`, or a number of steps")
        if self.steps is None or self.steps == "auto" or isinstance(self.warmup, float):
            return
        if self.warmup > self.steps:
            what = f" = {self.warmup} is more than steps = {self.steps}"
            yield wrong(f"{at}.warmup", what, "choose a shorter warmup, or more steps")
        elif self.warmup + (self.decay or 0) > self.steps:
            what = f" = {self.decay} is more than the {self.steps - self.warmup} steps after the warm-up"
            yield wrong(f"{at}.decay", what, "choose a shorter decay, or more steps")


class RateFunction:
    """Owns the user's function. Raises PlanError if it cannot be imported, fails, or returns no factor."""

    def __init__(self, reference: str) -> None:
        named = NamedCode(reference, KIND_KEY)
        self._reference, self._function = reference, named.load()
        if not callable(self._function):
            what = f"{KIND_KEY}: {reference} is a {type(self._function).__name__}, not a function"
            raise PlanError(what, where=KIND_KEY, fix=f"write {named.forms}")

    def __call__(self, step: int) -> float:
        """Return the factor of step number ``step``, from 0."""
        what = f"the learning-rate function {self._reference} failed at step {step}"
        fix = "it gets one argument, the number of the step (an int, from 0), and returns the factor of lr"
        with refusing(what, where=lambda error: line_of(error) or self._place, fix=fix):
            value = self._function(step)
        factor = _number(value)
        if factor is None or not 0 <= factor < math.inf:
            shown = type(value).__name__ if factor is None else f"{factor:g}"
            raise PlanError(
                f"the learning-rate function {self._reference} returned {shown} for step {step}",
                where=self._place,
                fix="return a finite number of 0 or more: the factor of lr",
            )
        return factor

    @property
    def _place(self) -> Where | str:
        return where_of_definition(self._function) or KIND_KEY


def check_rate_function(kind: str) -> None:
    """Raise PlanError if ``kind`` of a schedule names a function that fails at its first step."""
    if is_named(kind):
        RateFunction(kind)(0)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
