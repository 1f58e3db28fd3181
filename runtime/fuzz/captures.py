"""The captures of one model: cases that differ in other keys of the spec share one."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from passes.errors import PlanError
from planner import Captured, capture
from planner.spec.spec import Spec
from runtime.fuzz.case import Case
from runtime.fuzz.specs import OF_CAPTURES
from runtime.verify.run import in_mode


class Captures:
    """Owns a built model and its capture for each combination so far of ``specs.OF_CAPTURES``."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], Captured | PlanError] = {}

    def of(self, case: Case, spec: Spec) -> Captured:
        """Raises PlanError if the model cannot be captured."""
        key = attrgetter(*OF_CAPTURES)(spec)
        if key not in self._found:
            self._found[key] = _captured(case, spec)
        if isinstance(found := self._found[key], PlanError):
            raise found
        return found


def _captured(case: Case, spec: Spec) -> Captured | PlanError:
    try:
        return capture(in_mode(case.build(), spec), spec)
    except PlanError as error:
        return error
