"""What a run tells its user: the figures of a step, and before the first one what the plan warns of."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from planner.frozen_plan import Plan


class PlanWarning(UserWarning):
    """Numbers can differ from those of one process, or ranks repeat work; ``plan.diagnostics`` says more."""


def warn_of(plan: Plan, rank: int) -> None:
    """On rank 0: one Python warning for each thing that the plan warns of, however many layers it stands in."""
    rows = {row.what: row for row in plan.diagnostics if row.level == "warning" and rank == 0}
    for row in rows.values():
        place, fix = f" (at {row.where})" if row.where else "", f"; {row.fix}" if row.fix else ""
        warnings.warn(f"{row.what}{place}{fix}", PlanWarning, stacklevel=4)


@dataclass(frozen=True, slots=True)
class StepReport:
    """One update, the same on every rank.

    ``loss``: mean over the valid tokens of the global batch. ``grad_norm``: of all parameters, before clipping.
    ``skipped``: a gradient was not finite, so nothing changed. ``tokens_per_s``: elements of the first integer input of
    the global batch, by this rank's clock.
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class StepRow:
    """One line of the log. ``one_process_loss`` is the loss of the single process, where it runs beside."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    skipped: bool = False
    one_process_loss: float | None = None
