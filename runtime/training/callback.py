"""``--callback FILE.py:FUNCTION``: a function of the user's that gets each row of the run, on rank 0.

    function(row)         reads
    function(row, run)    also asks: ``run.stop()``, ``run.set_lr(x)``, ``run.save()``, ``run.log(name, value)``

Rank 0 alone knows what was asked; the sum of the next update says that something was, and all ranks then get it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from passes.errors import PlanError, first_line
from planner.named_code import NamedCode, line_of
from runtime.distributed.stopping import announce_orders
from runtime.report.step_row import StepRow

FORMS = (
    "FILE.py:FUNCTION, a function of the row of a step (loss, validation_loss, step …) and, if it takes two arguments, "
    "of the run (stop, set_lr, save, log)"
)


@dataclass
class Orders:
    """What a callback has asked for since the last time. ``lr``: None, if ``changes_lr``: the schedule again."""

    stop: bool = False
    save: bool = False
    changes_lr: bool = False
    lr: float | None = None

    @classmethod
    def of_json(cls, given: Mapping[str, Any]) -> Self:
        return cls(**given)


class Run:
    """The run, for a callback. All ranks do what it asks after the next step, on a GPU after the one behind it;
    after the last step, nothing but ``log`` has an effect.
    """

    def __init__(self, num_steps: int, *, has_saves: bool, is_compared: bool) -> None:
        self.num_steps = num_steps
        self._has_saves, self._is_compared = has_saves, is_compared
        self._orders, self._figures = Orders(), dict[str, float]()

    def stop(self) -> None:
        """End the training, as after its last step: with a save, if it has saves."""
        self._orders.stop = True
        announce_orders(True)

    def save(self) -> None:
        if not self._has_saves:
            raise ValueError("run.save() needs a directory: add --save DIR")
        self._orders.save = True
        announce_orders(True)

    def set_lr(self, lr: float | None) -> None:
        """A learning rate in place of the schedule's, from then on; None: the schedule again. Saves keep it."""
        if lr is not None and not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"run.set_lr({lr}): a learning rate is a number, 0 or more")
        if self._is_compared:
            raise ValueError("run.set_lr: the one process of --compare trains by the schedule; remove --compare")
        self._orders.changes_lr, self._orders.lr = True, None if lr is None else float(lr)
        announce_orders(True)

    def log(self, name: str, value: float) -> None:
        """A figure of this step, for the log, TensorBoard and Weights & Biases."""
        if name in StepRow.__dataclass_fields__:
            raise ValueError(f"run.log({name!r}): every row has a figure of this name")
        self._figures[str(name)] = float(value)

    def orders(self) -> dict[str, Any]:
        """As JSON; none are left."""
        found, self._orders = self._orders, Orders()
        announce_orders(False)
        return asdict(found)

    def figures(self) -> dict[str, float]:
        """Of this step; none are left."""
        found, self._figures = self._figures, {}
        return found


class Callback:
    """Owns the function. Whatever it raises is a PlanError that names its file and line; then all ranks end."""

    def __init__(self, reference: str) -> None:
        """Runs the file. Raises PlanError if that fails, or has no such function."""
        self._function: Callable[..., Any] = NamedCode(reference, "--callback", FORMS).load()
        self._takes_run = _takes_two(self._function)

    def __call__(self, row: StepRow, run: Run) -> None:
        try:
            self._function(row, run) if self._takes_run else self._function(row)
        except Exception as error:
            what = f"the callback failed after step {row.step}: {first_line(error)}"
            fix = "correct it, or remove --callback"
            raise PlanError(what, where=line_of(error) or "--callback", fix=fix) from error


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a builtin
        return False
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True
