"""Many cases one after another: draw, run, shrink the failures, sum up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from runtime.fuzz.case import Case
from runtime.fuzz.forks import StoreHost
from runtime.fuzz.run import Outcome, Verdict, run_case
from runtime.fuzz.shrink import shrunk

Row = tuple[str, ...]
COLUMNS = ("cases", "outcome", "reason")


@dataclass(frozen=True, slots=True)
class Failure:
    """A failing case, as small as it was found to fail, and the file that runs it again."""

    seed: int
    case: Case
    outcome: Outcome
    file: Path


@dataclass
class Campaign:
    """Owns the counts and failures so far. ``seed``: of the first case, the next has the next. ``folder``: of files.

    ``say``: told of each finished case, and of each failure.
    """

    seed: int
    most_ranks: int
    folder: Path
    say: Callable[[str], None]
    counts: Counter[tuple[Verdict, str]] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._host, self._number = StoreHost(), 0

    def run(self, num_cases: int | None, seconds: float | None) -> None:
        """Until so many cases are done or so much time has passed; an interrupt keeps what was found."""
        end = None if seconds is None else time.monotonic() + seconds
        seed = self.seed
        try:
            while (num_cases is None or seed < self.seed + num_cases) and (end is None or time.monotonic() < end):
                self.run_seed(seed)
                seed += 1
        except KeyboardInterrupt:
            self.say("interrupted")

    def run_seed(self, seed: int) -> None:
        case = Case.drawn(seed, self.most_ranks)
        outcome = self.outcome_of(case)
        self.counts[outcome.verdict, outcome.kind] += 1
        self.say(f"seed {seed}: {outcome.verdict}")
        if outcome.verdict.is_failure:
            self.note_failure(seed, case, outcome)

    def note_failure(self, seed: int, case: Case, outcome: Outcome) -> None:
        self.say(f"seed {seed}: {outcome.words}\n  {case}\n  looking for a smaller case")
        for smaller, found in shrunk(case, outcome, self.outcome_of, self.most_ranks):
            case, outcome = smaller, found
        file = self.folder / f"fuzz-{seed}.json"
        case.save(file)
        self.failures.append(Failure(seed, case, outcome, file))
        self.say(f"seed {seed}, as small as it fails: {outcome.words}\n  {case}\n  run it again: --case {file}")

    def outcome_of(self, case: Case) -> Outcome:
        self._number += 1
        return run_case(case, self._host, self._number)

    def rows(self) -> list[Row]:
        """The summary: how many cases of each outcome and reason, failures first."""
        order = (Verdict.CRASHED, Verdict.DIFFERS, Verdict.EQUAL, Verdict.REFUSED)
        found = sorted(self.counts.items(), key=lambda item: (order.index(item[0][0]), -item[1], item[0][1]))
        return [(str(count), verdict.value, reason) for (verdict, reason), count in found]
