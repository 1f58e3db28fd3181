"""What a training step reports."""

from __future__ import annotations

from dataclasses import dataclass


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
