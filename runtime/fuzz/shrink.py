"""Make a failing case as small as it stays failing: one field at a time becomes simpler, until none can."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from runtime.fuzz.case import Case
from runtime.fuzz.run import Outcome

MOST_RUNS = 80


def shrunk(
    case: Case, outcome: Outcome, run: Callable[[Case], Outcome], most_ranks: int
) -> Iterator[tuple[Case, Outcome]]:
    """Ever simpler cases that fail in the same way, the last one the simplest that ``MOST_RUNS`` runs find."""
    seen, runs = {str(case)}, 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for simpler in case.simpler(most_ranks):
            if str(simpler) in seen:
                continue
            if runs == MOST_RUNS:
                return
            seen.add(str(simpler))
            runs += 1
            found = run(simpler)
            if found.is_like(outcome):
                case, outcome, is_smaller = simpler, found, True
                yield case, outcome
                break
