"""``--callback FILE.py:FUNCTION``: a function of the user's that gets each row of the run, on rank 0."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from passes.errors import PlanError, Where, first_line
from runtime.report.step_row import StepRow

FIX = "write FILE.py:FUNCTION, a function with one argument: the row of a step (loss, validation_loss, step …)"


class Callback:
    """Owns the function. Whatever it raises is a PlanError that names its file and line; then all ranks end."""

    def __init__(self, reference: str) -> None:
        """Runs the file. Raises PlanError if that fails, or has no such function."""
        file, _, name = reference.rpartition(":")
        self._file = Path(file)
        if not file.endswith(".py") or not self._file.is_file():
            raise PlanError(f"--callback {reference}: no Python file {file!r}", where="--callback", fix=FIX)
        self._function = self._found(name)

    def write(self, row: StepRow) -> None:
        try:
            self._function(row)
        except Exception as error:
            raise self._error(f"the callback failed after step {row.step}", error) from error

    def close(self) -> None:
        """Nothing is held."""

    def _found(self, name: str) -> Callable[[StepRow], Any]:
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
