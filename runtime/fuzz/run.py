"""Run one case: plan it, run its ranks as forks, and compare them with the model itself in one process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import nn

from passes.lower import check_stages
from planner import plan
from planner.errors import PlanError
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.fuzz.case import Case
from runtime.fuzz.forks import ForkError, StoreHost, in_fork
from runtime.verify.beside import Beside
from runtime.verify.comparison import Row
from runtime.verify.run import in_mode, one_process, random_batch, run_beside

NUM_STEPS = 3
CASE_SECONDS = 240.0


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
    """``words``: the reason of a refusal, the first wrong tensor, or the error."""

    verdict: Verdict
    words: str = ""

    @property
    def kind(self) -> str:
        """Equal for outcomes of one cause, as far as words say: numbers and names are left out."""
        first = self.words.strip().splitlines()[0] if self.words.strip() else ""
        return re.sub(r"[\d.,]+(e[+-]?\d+)?|'[^']*'|`[^`]*`", "…", first)


def run_case(case: Case, host: StoreHost, number: int) -> Outcome:
    """In a fork of this process, which keeps nothing of it."""
    try:
        return in_fork(_in_fork, case, host, number, timeout_seconds=CASE_SECONDS)
    except (ForkError, Exception) as error:
        return Outcome(Verdict.CRASHED, _last_line(error))


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip() and not line[0].isspace()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def _in_fork(case: Case, host: StoreHost, number: int) -> Outcome:
    torch.set_num_threads(1)
    try:
        spec = Spec.load(case.to_spec())
        model = in_mode(case.build(), spec)
        decided = plan(model, spec)
        check_stages(decided)
    except PlanError as error:
        return _refused(error)
    host.begin(f"{number:x}")
    try:
        rows = host.run_ranks(case.world_size, _on_rank, decided, model, spec)[0]
    except PlanError as error:
        return _refused(error)
    wrong = [row for row in rows if not row.passed]
    return Outcome(Verdict.DIFFERS, f"{len(wrong)} of {len(rows)}: {wrong[0]}") if wrong else Outcome(Verdict.EQUAL)


def _refused(error: PlanError) -> Outcome:
    """A refusal must name a source line or a key of the spec."""
    if error.where and str(error.where) and error.fix:
        return Outcome(Verdict.REFUSED, str(error))
    return Outcome(Verdict.CRASHED, f"refused without a place: {error}")


def _on_rank(decided: Plan, model: nn.Module, spec: Spec) -> list[Row]:
    batches = [random_batch(spec, decided, seed) for seed in range(NUM_STEPS)]
    beside = run_beside(decided, batches, lambda: Beside(one_process(model, spec)))
    return [] if beside is None else beside.rows
