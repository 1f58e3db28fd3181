"""Which steps are profiled."""

from __future__ import annotations

import re
from dataclasses import dataclass

from passes.errors import PlanError


@dataclass(frozen=True, slots=True)
class Window:
    """``5``: five steps, after the first one of the run, which is slow. ``10:13``: steps 10 to 13, counted from 1."""

    first: int | None
    last: int
    text: str

    @classmethod
    def parse(cls, text: str, num_steps: int) -> Window:
        """Raises PlanError for any other text, and for steps that a training of ``num_steps`` does not make."""
        found = re.fullmatch(r"(?:(\d+):)?(\d+)", text.strip(), re.ASCII)
        if found is None or len(text) > 20:
            raise _error(f"{text!r} names no steps")
        first, last = int(found[1]) if found[1] else None, int(found[2])
        if last < 1 or (first is not None and not 1 <= first <= last):
            raise _error(f"{text} is not a range of steps; steps count from 1")
        made = last if first is not None else last + 1
        if made > num_steps:
            raise _error(f"--profile {text} ends at step {made}, but the run has {num_steps} steps")
        return cls(first, last, text)

    def steps(self, made: int) -> range:
        """Their numbers, in a run before which ``made`` steps were made."""
        if self.first is None:
            return range(made + 2, made + 2 + self.last)
        return range(max(self.first, made + 1), self.last + 1)


def _error(what: str) -> PlanError:
    return PlanError(
        what,
        where="--profile",
        fix="write a number of steps, such as 3, or the first and the last, such as 10:13; or train longer",
    )
