"""A learning-rate schedule that is a function of the user's: of the step, from 0, it returns the factor of ``lr``."""

from __future__ import annotations

import inspect
import math
from typing import Any

from passes.errors import PlanError, Where, first_line
from planner.named_code import NamedCode, is_named, line_of

KEY = "optimizer.schedule.kind"


class RateFunction:
    """Owns the function. Raises PlanError if it cannot be imported, fails, or returns no factor."""

    def __init__(self, reference: str) -> None:
        named = NamedCode(reference, KEY)
        self._reference, self._function = reference, named.load()
        if not callable(self._function):
            what = f"{KEY}: {reference} is a {type(self._function).__name__}, not a function"
            raise PlanError(what, where=KEY, fix=f"write {named.forms}")

    def __call__(self, step: int) -> float:
        """The factor of step number ``step``, from 0."""
        try:
            value = self._function(step)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of the user's code: it may derive from any class
            what = f"the learning-rate function {self._reference} failed at step {step}: {first_line(error)}"
            fix = "it gets one argument, the number of the step (an int, from 0), and returns the factor of lr"
            raise PlanError(what, where=line_of(error) or self._place(), fix=fix) from error
        factor = _number(value)
        if factor is None or not 0 <= factor < math.inf:
            shown = type(value).__name__ if factor is None else f"{factor:g}"
            raise PlanError(
                f"the learning-rate function {self._reference} returned {shown} for step {step}",
                where=self._place(),
                fix="return a finite number of 0 or more: the factor of lr",
            )
        return factor

    def _place(self) -> Where | str:
        try:
            lines, start = inspect.getsourcelines(self._function)
            return Where(file=inspect.getsourcefile(self._function) or "", line=start, code=lines[0].strip())
        except (OSError, TypeError):
            return KEY


def check_rate_function(kind: str) -> None:
    """Raise PlanError if ``kind`` of a schedule names a function that is bad, as far as its first step shows."""
    if is_named(kind):
        RateFunction(kind)(0)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
