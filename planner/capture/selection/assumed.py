"""Branches with one side that only raises: the plan assumes the other side.

    if not (ids < n).all(): raise ValueError          the answer is assumed to be yes

An export needs an answer, and trials find the one that raises. If the forward raises after an answer, before it asks
anything else, the opposite is assumed; otherwise the opposite is tried too. If neither raises, the branch depends on
data, and is refused at its line. Questions from the same place in the code, with the same callers, have one answer.
"""

import dis
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch

from passes.errors import PlanError, Where
from passes.interceptors import installed
from passes.program.program import Assumption, Condition
from passes.program.source_lines import is_foreign_frame
from planner.capture.data_dependence import not_captured

CHECK = "this check does not raise"
DRAW = "a number drawn from [0, 1) is not exactly 0, which is the case for one in 16,777,216"
Key = tuple[tuple[str, str, int], ...]
T = TypeVar("T")

_TORCH = os.path.dirname(torch.__file__) + os.sep
# PyTorch's own checks of a user's values; all else that it raises says that tracing failed
_CHECKING = tuple(_TORCH + part for part in ("nn" + os.sep, "distributions" + os.sep, "functional.py", "__init__.py"))


class ExportAgain(PlanError):
    """Raised in a forward once one more mask is assumed to select every row (planner.capture.selection.full_masks)."""


@dataclass(slots=True)
class Taken:
    """The answer to the question at ``key`` in one export."""

    key: Key
    answer: bool
    where: Where
    is_sure: bool  # whether earlier masks were assumed to select rows, as in the export that is kept
    condition: Condition | None = None


class Assumptions:
    """Owns the assumed answers, and those with an opposite after which the forward raises."""

    def __init__(self) -> None:
        self.flipped: Key | None = None
        self.full: set[Key] = set()  # where masks select rows, all of them as is assumed
        self._answers: dict[Key, bool] = {}
        self._raises: dict[Key, str] = {}  # of answers that were tried the other way round
        self._last: Taken | None = None
        self._taken: dict[Key, list[Taken]] = {}
        self._checks: dict[tuple[Where, str], Condition | None] = {}

    # ---- while a forward runs

    def begin(self) -> None:
        self._last = None
        self._taken = {}
        self._checks = {}

    def checks(self, where: Where, condition: Condition | None, what: str = CHECK) -> None:
        """Note a check that PyTorch makes when the forward runs, or ``what``; None if a host cannot make it."""
        if condition is not None:
            self._checks[where, what] = condition

    def drew(self, where: Where) -> None:
        """Note a comparison that is certain unless a number drawn from [0, 1) is exactly 0."""
        self._checks[where, DRAW] = None

    def answer(self, key: Key) -> bool | None:
        """Return the assumed answer to the question at ``key``; None without one."""
        answer = self._answers.get(key)
        return answer if answer is None or key != self.flipped else not answer

    def guess(self, key: Key) -> bool:
        """Return an answer to a question that only a trial can settle."""
        return self._answers.setdefault(key, True)

    def took(self, taken: Taken) -> None:
        self._last = taken
        if taken.key in self._answers:
            self._taken.setdefault(taken.key, []).append(taken)

    # ---- afterwards

    def settled(self, attempt: Callable[[], T], trial: Callable[[], Any]) -> T:
        """Return the result of ``attempt`` with answers that do not raise. ``trial``: one forward alone, with one
        answer flipped.

        Raises PlanError if an answer decides more than whether the forward raises.
        """
        while True:
            try:
                found = attempt()
            except ExportAgain:
                continue
            except PlanError as error:
                if not self._learn(error):
                    raise
                continue
            kept = self._taken, self._checks
            for key in [key for key in self._answers if key not in self._raises]:
                self._try_flipped(key, kept[0], trial)
            self._taken, self._checks = kept
            return found

    def _learn(self, error: PlanError) -> bool:
        """Return whether the forward raised after an answer that another one may replace."""
        last, raised = self._last, _raised(error)
        if last is None or raised is None or last.key in self._raises:
            return False
        self._answers[last.key] = not last.answer
        if last.is_sure:
            self._raises[last.key] = raised
        return True

    def _try_flipped(self, key: Key, taken: dict[Key, list[Taken]], trial: Callable[[], Any]) -> None:
        if key not in taken:  # asked only after another answer
            del self._answers[key]
            return
        try:
            with installed((self, "flipped", key)):
                trial()
        except PlanError as error:
            raised = _raised(error)
            if raised is not None and self._last is not None and self._last.key == key:
                self._raises[key] = raised
        if key not in self._raises:
            raise branch_on_data(taken[key][0].where)

    def found(self, names: Sequence[str]) -> list[Assumption]:
        """Return the assumptions of the kept export, each check once. ``names``: batch keys, as its inputs."""
        rows: dict[tuple[Where, str], Assumption] = {}
        for key, all_taken in self._taken.items():
            for taken in all_taken:
                condition = taken.condition and taken.condition.named(names)
                row = Assumption(taken.where, f"{CHECK} ({self._raises[key]})", condition)
                rows.setdefault((taken.where, str(condition and condition.graph.graph)), row)
        for (where, what), condition in self._checks.items():
            named = condition and condition.named(names)
            if named is None and what not in (CHECK, DRAW):  # it reads parameters
                raise branch_on_data(where)
            rows[where, what] = Assumption(where, what, named)
        return list(rows.values())


def branch_on_data(where: Where) -> PlanError:
    return not_captured("a branch depends on the values of tensors (data-dependent)", where)


def key_of_stack() -> Key:
    """Return the place in the code that asks, and its callers; equal for layers of one kind in a loop."""
    frames = ((frame.f_code, frame.f_lasti) for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return tuple((code.co_filename, code.co_qualname, at) for code, at in frames if _is_checking(code.co_filename))


def _is_checking(file: str) -> bool:
    """Return whether code is a user's, or a check of PyTorch's."""
    return file.startswith(_CHECKING) or not is_foreign_frame(file)


def _raised(error: PlanError) -> str | None:
    """Return the exception that the user (or a check of PyTorch) raised, as text; None for any other failure."""
    cause = error.__cause__
    if cause is None or isinstance(cause, PlanError) or cause.__traceback__ is None:
        return None
    last: TracebackType = cause.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    if not _is_checking(code.co_filename) or code.co_code[last.tb_lasti] != dis.opmap["RAISE_VARARGS"]:
        return None
    text = str(cause).partition("FakeTensor")[0].strip(" (\n").splitlines()
    return f"{type(cause).__name__}: {text[0][:80]}" if text else type(cause).__name__
