"""Measured and planned memory of ranks: by category, and by action of the schedule."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.pipeline.schedule import Action
from planner.tables.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class Compared:
    """Bytes of one category on one rank. ``allowed``: maximum difference over the measured bytes; None: any."""

    rank: int
    category: str
    predicted: int
    measured: int
    allowed: float | None = None

    @property
    def difference(self) -> float:
        """The difference as a fraction of the measured bytes."""
        return (self.predicted - self.measured) / max(self.measured, 1)

    @property
    def passed(self) -> bool:
        return self.allowed is None or abs(self.difference) <= self.allowed


@dataclass(frozen=True, slots=True)
class ActionMemory:
    """Bytes that one rank keeps for all microbatches in flight while an action runs.

    ``predicted``: None if the plan does not predict them. ``live``: all live bytes at the action's peak, with messages.
    """

    rank: int
    pp_rank: int
    action: str
    predicted: int | None
    measured: int
    live: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """``rows`` and ``actions`` of every rank. ``notes``: lines of explanation."""

    rows: tuple[Compared, ...]
    notes: tuple[str, ...]
    actions: tuple[ActionMemory, ...]

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.passed for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        rows = [asdict(row) | {"difference": row.difference, "passed": row.passed} for row in self.rows]
        actions = [asdict(action) for action in self.actions]
        return {"passed": self.passed, "rows": rows, "actions": actions, "notes": list(self.notes)}

    def __str__(self) -> str:
        lines = [f"{'rank':>4}  {'category':<12}{'predicted':>12}{'measured':>12}{'difference':>12}  allowed"]
        for row in self.rows:
            allowed = "" if row.allowed is None else f"{row.allowed:.0%}" + ("" if row.passed else "  EXCEEDED")
            sizes = f"{format_bytes(row.predicted):>12}{format_bytes(row.measured):>12}{row.difference:>12.2%}"
            lines.append(f"{row.rank:>4}  {row.category:<12}{sizes}  {allowed}".rstrip())
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, "AS PREDICTED" if self.passed else "DIFFERS FROM THE PLAN"])


def predicted_by_action(of_microbatch: Sequence[int], order: Sequence[Action]) -> dict[str, int]:
    """Return action → bytes that a rank keeps while it runs. ``of_microbatch``: bytes of one microbatch, by chunk.

    Empty if the schedule has weight-gradient actions: the plan does not predict the tensors that backwards keep for
    them.
    """
    if any(action.kind == "W" for action in order):
        return {}
    by_action, kept = dict[str, int](), 0
    for action in order:
        size = of_microbatch[action.chunk]
        kept += size if action.kind == "F" else 0
        by_action[str(action)] = kept
        kept -= size if action.kind == "B" else 0
    return by_action
