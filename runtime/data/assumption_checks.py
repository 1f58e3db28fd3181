"""Checks of values that the model's forward makes in Python, made on the host for each batch.

In the unmodified model such a check raises at its line; the captured graph has none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from passes.errors import PlanError
from passes.program.assumptions import Assumption


def check_assumptions(batch: Mapping[str, Tensor], assumptions: Iterable[Assumption], micro: int) -> None:
    """Raise PlanError at the line of the first check that a microbatch fails. A batch on a device is not looked at."""
    for assumption in assumptions:
        condition = assumption.condition
        if condition is None or any(batch[name].device.type != "cpu" for name, _ in condition.inputs):
            continue
        size = len(next(iter(batch.values())))
        for start in range(0, size, micro):
            rows = {name: batch[name][start : start + micro] for name, _ in condition.inputs}
            if not condition.holds(rows):
                raise PlanError(
                    f"the batch fails a check of the model's forward, in rows {start} to {start + micro - 1}: "
                    f"{assumption.what.replace('does not raise', 'raises')}",
                    where=assumption.where,
                    fix="give a batch that the unmodified model accepts",
                )
