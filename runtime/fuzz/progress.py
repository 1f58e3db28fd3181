"""How far a campaign is, and how long it will still take."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Progress:
    """``num_cases``, ``seconds``: how many, how long; None if there is no such end. Owns: when it began."""

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
        """By the mean of those that are done; ``done`` is 1 or more."""
        found = [self.seconds - self.spent] if self.seconds is not None else []
        if self.num_cases is not None:
            found.append(self.spent / done * (self.num_cases - done))
        return max(0.0, min(found))

    def told(self, done: int) -> str:
        of = "" if self.num_cases is None else f" of {self.num_cases}"
        return f"{done}{of} done, about {self.seconds_left(done):.0f} s left"
