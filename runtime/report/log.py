"""The log of a run: a line of JSON for each step, flushed as it is written. docs/watching.md lists its keys."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from math import inf
from pathlib import Path

from planner.errors import PlanError, Where
from runtime.report.step_row import StepRow

_KEYS = tuple(field.name for field in dataclasses.fields(StepRow))


class Log:
    """Owns the open file. Of an earlier run it keeps the steps up to ``first``; the later ones will be made again.

    Every method raises PlanError, naming the file, where it cannot be written.
    """

    def __init__(self, path: str, first: int = 0) -> None:
        self.path = path
        kept = _lines_until(path, first)
        try:
            self._file = open(path, "w")  # noqa: SIM115 - closed by close()
            self._file.writelines(kept)
        except OSError as error:
            raise self._cannot_write(error) from error

    def write(self, row: StepRow) -> None:
        try:
            self._file.write(json.dumps({name: getattr(row, name) for name in _KEYS}) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._cannot_write(error) from error

    def close(self) -> None:
        with suppress(OSError):  # what could not be written has been told
            self._file.close()

    def _cannot_write(self, error: OSError) -> PlanError:
        return PlanError(
            f"cannot write the log: {error.strerror}",
            where=Where(file=self.path),
            fix="free space there, or log elsewhere",
        )


def rows_until(path: str | None, step: int) -> list[StepRow]:
    """The steps up to ``step`` that an earlier run has logged; none where there is no log of them."""
    found = [json.loads(line) for line in _lines_until(path, step)] if path else []
    return [StepRow(**{name: value for name, value in row.items() if name in _KEYS}) for row in found]


def _lines_until(path: str, step: int) -> list[str]:
    if not step or not Path(path).is_file():
        return []
    return [line for line in Path(path).read_text().splitlines(keepends=True) if _step_of(line) <= step]


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return inf  # a line that a kill cut short
