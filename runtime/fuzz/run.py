"""Run cases of one model: capture it once, plan each case, run its ranks as forks, and compare them with one process.

plan file       the plan is equal after saving and loading
values          loss, norm, gradients and parameters of three updates, and the mean of the weights (runtime.fuzz.rank)
memory          within the bounds of runtime.fuzz.rank
continued       another layout resumes from a save and repeats the third update

Cases share a capture unless they differ in a key on which captures depend.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from passes.errors import PlanError, Where
from planner import Captured, capture, plan
from planner.frozen_plan import Plan
from planner.lower import check_stages
from planner.spec.spec import Spec
from runtime.fuzz.case import Case
from runtime.fuzz.forks import ForkError, StoreHost, values_of
from runtime.fuzz.rank import OfRank, exceeds, go_on, on_rank
from runtime.fuzz.specs import NOT_KEYS, OF_CAPTURES
from runtime.verify.comparison import Row
from runtime.verify.run import in_mode

CASE_SECONDS = 900.0  # enough for one hanging call of ranks (forks.TIMEOUT_SECONDS) and the others


class Verdict(StrEnum):
    EQUAL = "equal"
    REFUSED = "refused"
    DIFFERS = "differs"
    CRASHED = "crashed"

    @property
    def is_failure(self) -> bool:
        return self in (Verdict.DIFFERS, Verdict.CRASHED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a case. ``words``: the reason of a refusal, the first wrong tensor, or the error; ``check``: the
    comparison that differs."""

    verdict: Verdict
    words: str = ""
    check: str = ""

    @property
    def kind(self) -> str:
        """The failed check, or the words without numbers and names: equal for outcomes with one cause."""
        first = self.words.strip().splitlines()[0] if self.words.strip() else ""
        if self.verdict is Verdict.DIFFERS:
            return self.check
        return re.sub(r"[\d.,]+(e[+-]?\d+)?|'[^']*'|`[^`]*`", "…", first)

    def is_like(self, other: Outcome) -> bool:
        """Return whether both fail in the same check; crashes also for the same reason."""
        is_crash = self.verdict is Verdict.CRASHED
        alike = (self.verdict, self.check) == (other.verdict, other.check)
        return alike and (not is_crash or self.kind == other.kind)


def run_cases(cases: Sequence[Case], host: StoreHost, number: int) -> Iterator[Outcome]:
    """Yield the outcome of each of ``cases``, which have one model. They run in a fork of this process.

    A case that ends the fork is a crash; the remaining cases run in a new fork.
    """
    done = 0
    while done < len(cases):
        try:
            for outcome in values_of(_in_fork, cases[done:], host, number + done, timeout_seconds=CASE_SECONDS):
                done += 1
                yield outcome
        except (ForkError, Exception) as error:
            done += 1
            yield Outcome(Verdict.CRASHED, _last_line(error))


def _last_line(error: BaseException) -> str:
    """Return the last line that names an exception, else the last one that is not indented."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line[0].isspace()]
    named = [line for line in lines if re.match(r"[\w.]+: ", line)]
    return f"{type(error).__name__}: {(named or lines or [''])[-1]}"


def _in_fork(cases: Sequence[Case], host: StoreHost, number: int) -> Iterator[Outcome]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # plans with warnings are compared too
    host.begin(f"{number:x}")
    captures = Captures()
    for case in cases:
        try:
            yield _outcome(case, captures, host)
        except PlanError as error:
            yield refused(error)


def _outcome(case: Case, captures: Captures, host: StoreHost) -> Outcome:
    """Return the outcome of one case. Raises PlanError if the case is refused."""
    with tempfile.TemporaryDirectory(prefix="meshwright-fuzz-") as folder:
        return _compared(case, captures, host, Path(folder))


def _planned(captured: Captured, spec: Spec) -> Plan:
    decided = plan(captured, spec)
    check_stages(decided)
    return decided


def _compared(case: Case, captures: Captures, host: StoreHost, folder: Path) -> Outcome:
    spec = Spec.load(case.to_spec())
    captured = captures.of(case, spec)
    decided, model = _planned(captured, spec), captured.model
    decided.save(folder / "plan.json")
    loaded = Plan.load(folder / "plan.json")
    if loaded != decided or loaded.hash() != decided.hash():
        return Outcome(Verdict.DIFFERS, "the plan differs after saving and loading", "plan file")
    other, saves = _other_layout(case, captures), folder / "saves"
    of_ranks: list[OfRank] = host.run_ranks(
        case.world_size, on_rank, decided, model, spec, None if other is None else saves, case.is_local
    )
    outcome = _judged(of_ranks[0].rows, "values", "")
    exceeding = [row for rank in of_ranks for row in rank.memory if exceeds(row)]
    if not outcome.verdict.is_failure and exceeding:
        row = exceeding[0]
        words = f"rank {row.rank} holds {row.measured} bytes of {row.category}, the plan has {row.predicted}"
        outcome = Outcome(Verdict.DIFFERS, words, "memory")
    if outcome.verdict.is_failure or other is None:
        return outcome
    rows = host.run_ranks(other[0].mesh.world_size, go_on, *other, saves, of_ranks[0].last)[0]
    return _judged(rows, "continued", "continued on another layout: ")


def _other_layout(case: Case, captures: Captures) -> tuple[Plan, Spec] | None:
    """Return the layout that resumes from a save; None if the case has none, or if it is refused."""
    values: Any = case.continued()
    if values is None:
        return None
    spec = Spec.load(values)
    try:
        return _planned(captures.of(case, spec), spec), spec
    except PlanError as error:
        if refused(error).verdict.is_failure:
            raise
        return None


def _judged(rows: Sequence[Row], check: str, before: str) -> Outcome:
    wrong = [row for row in rows if not row.passed]
    if not wrong:
        return Outcome(Verdict.EQUAL)
    named = next((row for row in wrong if row.name), wrong[0])
    first = f"first: {named}" if named is wrong[0] else f"first: {wrong[0]}; first tensor: {named}"
    return Outcome(Verdict.DIFFERS, f"{before}{len(wrong)} of {len(rows)} differ; {first}", check)


def refused(error: PlanError) -> Outcome:
    """Return the outcome of a refusal, which must have a fix, and a source line or key of the spec; else a crash."""
    where: Any = error.where
    is_line = isinstance(where, Where) and bool(where.line or _is_key(where.module))
    if error.fix and (is_line or _is_key(str(where or ""))):
        return Outcome(Verdict.REFUSED, str(error))
    return Outcome(Verdict.CRASHED, f"refused without a source line or a key of the spec: {error}")


def _is_key(where: str) -> bool:
    return where.partition(".")[0].partition(" ")[0] in Spec.model_fields


class Captures:
    """The captures of a model, one for each combination of values of ``specs.OF_CAPTURES``."""

    def __init__(self) -> None:
        self._captures: dict[tuple[Any, ...], Captured | PlanError] = {}

    def of(self, case: Case, spec: Spec) -> Captured:
        """Return the capture of a case. Raises PlanError if the model cannot be captured."""
        key = attrgetter(*(name for name in OF_CAPTURES if name not in NOT_KEYS))(spec)
        if key not in self._captures:
            try:
                self._captures[key] = capture(in_mode(case.build(), spec), spec)
            except PlanError as error:
                self._captures[key] = error
        if isinstance(captured := self._captures[key], PlanError):
            raise captured
        return captured
