"""Many cases in turn: draw, run, reduce failing ones, summarize."""

import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from runtime.fuzz.case import Case, Model
from runtime.fuzz.forks import StoreHost
from runtime.fuzz.run import Outcome, Verdict, run_cases

Row = tuple[str, ...]
COLUMNS = ("cases", "outcome", "reason")
SPECS_OF_A_MODEL = 4  # a capture takes about as long as three cases


@dataclass(frozen=True, slots=True)
class Failure:
    """A failing case, reduced, and the file from which it can be rerun."""

    name: str
    case: Case
    outcome: Outcome
    file: Path


@dataclass
class Campaign:
    """A series of cases, with its counts and failures. ``seed``: of the first model; the next adds 1. ``folder``: for
    files.

    ``say``: called with each finished case and each failure. ``model_of``: seed → model. ``num_specs``: cases per
    model.
    """

    seed: int
    most_ranks: int
    folder: Path
    say: Callable[[str], None]
    model_of: Callable[[int], Model]
    num_specs: int = SPECS_OF_A_MODEL
    counts: Counter[tuple[Verdict, str]] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._host, self._number = StoreHost(), 0

    def run(self, num_cases: int | None, seconds: float | None) -> None:
        """Run ``num_cases`` cases, or until ``seconds`` have passed; an interrupt keeps the results so far."""
        progress, done, seed = Progress(num_cases, seconds), 0, self.seed
        try:
            while not progress.is_over(done):
                num = self.num_specs if num_cases is None else min(self.num_specs, num_cases - done)
                for name, words in self.run_model(seed, num):
                    done += 1
                    self.say(f"seed {name}: {words}   ({progress.told(done)})")
                seed += 1
        except KeyboardInterrupt:
            self.say("interrupted: results so far are kept")

    def run_model(self, seed: int, num_specs: int) -> Iterator[tuple[str, str]]:
        """Yield the name and the verdict of each case of a model. The first case of seed 7 is 7, then 7.1, …."""
        cases = {str(seed): (first := Case.drawn(seed, self.most_ranks, self.model_of(seed)))}
        cases |= {f"{seed}.{k}": first.another(seed, k, self.most_ranks) for k in range(1, num_specs)}
        outcomes = self.outcomes_of(list(cases.values()))
        for (name, case), outcome in zip(cases.items(), outcomes, strict=True):
            self.counts[outcome.verdict, outcome.kind] += 1
            if outcome.verdict.is_failure:
                self.note_failure(name, case, outcome)
            yield name, outcome.verdict

    def note_failure(self, name: str, case: Case, outcome: Outcome) -> None:
        """Write the file now, and again for each smaller case, so that an interrupt leaves the smallest so far."""
        self.say(f"seed {name} {outcome.verdict}: {outcome.words}\n  {case}\n  searching for a smaller case")
        file, place = self.folder / f"fuzz-{name}.json", len(self.failures)
        case.save(file)
        self.failures.append(Failure(name, case, outcome, file))
        for smaller, its_outcome in shrunk(case, outcome, self.outcome_of, self.most_ranks):
            smaller.save(file)
            self.failures[place] = Failure(name, smaller, its_outcome, file)
            self.say(f"  smaller: {smaller}")

    def outcome_of(self, case: Case) -> Outcome:
        return next(self.outcomes_of([case]))

    def outcomes_of(self, cases: list[Case]) -> Iterator[Outcome]:
        """Yield the outcomes of cases of one model."""
        number = self._number
        self._number += len(cases)
        yield from run_cases(cases, self._host, number)

    def rows(self) -> list[Row]:
        """Return the summary: the number of cases of each outcome and reason, failures first."""
        order = (Verdict.CRASHED, Verdict.DIFFERS, Verdict.EQUAL, Verdict.REFUSED)
        ordered = sorted(self.counts.items(), key=lambda item: (order.index(item[0][0]), -item[1], item[0][1]))
        return [(str(count), verdict.value, reason) for (verdict, reason), count in ordered]


def told(failure: Failure, command: str) -> str:
    """Return a failure in words. ``command``: the command that reruns a case from its file."""
    words = f"seed {failure.name}, reduced: {failure.outcome.words}"
    return f"{words}\n  {failure.case}\n  rerun it: {command} --case {failure.file}"


def processor_seconds() -> float:
    """Return the processor seconds of this process and of all its finished forks."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@dataclass
class Progress:
    """Progress towards ``num_cases`` cases or ``seconds`` seconds (None: no limit), from its creation on."""

    num_cases: int | None
    seconds: float | None

    def __post_init__(self) -> None:
        self._begin = time.monotonic()

    @property
    def spent(self) -> float:
        return time.monotonic() - self._begin

    def is_over(self, done: int) -> bool:
        is_late = self.seconds is not None and self.spent >= self.seconds
        return is_late or (self.num_cases is not None and done >= self.num_cases)

    def seconds_left(self, done: int) -> float:
        """Return the estimated remaining seconds, by the mean of the cases ``done``, 1 or more."""
        limits = [self.seconds - self.spent] if self.seconds is not None else []
        if self.num_cases is not None:
            limits.append(self.spent / done * (self.num_cases - done))
        return max(0.0, min(limits))

    def told(self, done: int) -> str:
        of = "" if self.num_cases is None else f" of {self.num_cases}"
        return f"{done}{of} done, about {self.seconds_left(done):.0f} s left"


MOST_RUNS = 80


def shrunk(
    case: Case, outcome: Outcome, run: Callable[[Case], Outcome], most_ranks: int
) -> Iterator[tuple[Case, Outcome]]:
    """Yield ever simpler cases that fail in the same way, within ``MOST_RUNS`` runs."""
    tried, runs = {str(case)}, 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for simpler in case.simpler(most_ranks):
            if str(simpler) in tried:
                continue
            if runs == MOST_RUNS:
                return
            tried.add(str(simpler))
            runs += 1
            its_outcome = run(simpler)
            if its_outcome.is_like(outcome):
                case, outcome, is_smaller = simpler, its_outcome, True
                yield case, outcome
                break
