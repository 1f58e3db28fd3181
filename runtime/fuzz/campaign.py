"""Many cases one after another: draw, run, shrink the failures, sum up."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from runtime.fuzz.case import Case
from runtime.fuzz.forks import StoreHost
from runtime.fuzz.own_model import OwnModel
from runtime.fuzz.progress import Progress
from runtime.fuzz.run import Outcome, Verdict, run_case
from runtime.fuzz.shrink import shrunk

Row = tuple[str, ...]
COLUMNS = ("cases", "outcome", "reason")


@dataclass(frozen=True, slots=True)
class Failure:
    """A failing case, reduced, and the file that runs it again."""

    seed: int
    case: Case
    outcome: Outcome
    file: Path


@dataclass
class Campaign:
    """Owns the counts and failures so far. ``seed``: of the first case, the next has the next. ``folder``: of files.

    ``say``: called with each finished case and each failure. ``own``: the user's model; None: models are drawn.
    """

    seed: int
    most_ranks: int
    folder: Path
    say: Callable[[str], None]
    own: OwnModel | None = None
    counts: Counter[tuple[Verdict, str]] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._host, self._number = StoreHost(), 0

    def run(self, num_cases: int | None, seconds: float | None) -> None:
        """Until so many cases are done or so much time has passed; an interrupt keeps what was found."""
        progress, done = Progress(num_cases, seconds), 0
        try:
            while not progress.is_over(done):
                seed, done = self.seed + done, done + 1
                words = self.run_seed(seed)
                self.say(f"seed {seed}: {words}   ({progress.told(done)})")
        except KeyboardInterrupt:
            self.say("interrupted: results so far are kept")

    def run_seed(self, seed: int) -> str:
        """The verdict in a word, and of a failure what is wrong, where, and the file."""
        case = Case.drawn(seed, self.most_ranks, self.own)
        outcome = self.outcome_of(case)
        self.counts[outcome.verdict, outcome.kind] += 1
        if outcome.verdict.is_failure:
            self.note_failure(seed, case, outcome)
        return outcome.verdict

    def note_failure(self, seed: int, case: Case, outcome: Outcome) -> None:
        """The file is written at once, and again for each smaller case: an interrupt leaves the smallest so far."""
        self.say(f"seed {seed} {outcome.verdict}: {outcome.words}\n  {case}\n  searching for a smaller case")
        file, place = self.folder / f"fuzz-{seed}.json", len(self.failures)
        case.save(file)
        self.failures.append(Failure(seed, case, outcome, file))
        for smaller, found in shrunk(case, outcome, self.outcome_of, self.most_ranks):
            smaller.save(file)
            self.failures[place] = Failure(seed, smaller, found, file)
            self.say(f"  smaller: {smaller}")

    def outcome_of(self, case: Case) -> Outcome:
        self._number += 1
        return run_case(case, self._host, self._number)

    def rows(self) -> list[Row]:
        """The summary: how many cases of each outcome and reason, failures first."""
        order = (Verdict.CRASHED, Verdict.DIFFERS, Verdict.EQUAL, Verdict.REFUSED)
        found = sorted(self.counts.items(), key=lambda item: (order.index(item[0][0]), -item[1], item[0][1]))
        return [(str(count), verdict.value, reason) for (verdict, reason), count in found]


def told(failure: Failure) -> str:
    words = f"seed {failure.seed}, reduced: {failure.outcome.words}"
    return f"{words}\n  {failure.case}\n  run it again: meshwright fuzz --case {failure.file}"


def processor_seconds() -> float:
    """Of this process and of all its forks that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
