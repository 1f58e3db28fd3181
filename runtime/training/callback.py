"""``--callback FILE.py:FUNCTION``: a function of the user's that gets each row of the run, on rank 0.

    function(row)         reads
    function(row, run)    also asks: ``run.stop()``, ``run.set_lr(x)``, ``run.save()``, ``run.log(name, value)``

Rank 0 alone knows what was asked; the sum of the next update says that something was, and all ranks then get it.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from passes.errors import PlanError, Where, first_line
from runtime.distributed.stopping import announce_orders
from runtime.report.step_row import StepRow

FIX = (
    "write FILE.py:FUNCTION, a function of the row of a step (loss, validation_loss, step …) and, if it takes two "
    "arguments, of the run (stop, set_lr, save, log)"
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
        file, _, name = reference.rpartition(":")
        self._file = Path(file)
        if not file.endswith(".py") or not self._file.is_file():
            raise PlanError(f"--callback {reference}: no Python file {file!r}", where="--callback", fix=FIX)
        self._function = self._found(name)
        self._takes_run = _takes_two(self._function)

    def __call__(self, row: StepRow, run: Run) -> None:
        try:
            self._function(row, run) if self._takes_run else self._function(row)
        except Exception as error:
            raise self._error(f"the callback failed after step {row.step}", error) from error

    def _found(self, name: str) -> Callable[..., Any]:
        spec = importlib.util.spec_from_file_location(self._file.stem, self._file.resolve())
        assert spec is not None, self._file
        assert spec.loader is not None, self._file
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise self._error("the file of --callback cannot be imported", error) from error
        function = getattr(module, name, None)
        if not callable(function):
            raise PlanError(f"no function {name!r} for --callback", where=Where(file=str(self._file)), fix=FIX)
        return function

    def _error(self, what: str, error: Exception) -> PlanError:
        own = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == self._file.resolve()]
        where = Where(file=str(self._file), line=own[-1].lineno or 0, code=own[-1].line or "") if own else None
        return PlanError(
            f"{what}: {first_line(error)}", where=where or str(self._file), fix="correct it, or remove --callback"
        )


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
