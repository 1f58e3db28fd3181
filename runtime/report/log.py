"""The log of a run: a line of JSON for each step, flushed at once. docs/watching.md lists its keys."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path

from passes.errors import PlanError, Where
from planner.files.atomic import replaced_file
from runtime.report.step_row import StepRow

_KEYS = tuple(field.name for field in dataclasses.fields(StepRow))


class Log:
    """Owns the open file. Of an earlier run it keeps the steps up to ``first``; the later ones are removed with the
    first repeated step, in one exchange of the file: a run that is killed before that has lost nothing.

    Every method raises PlanError, naming the file, if it cannot be written.
    """

    def __init__(self, path: str, first: int = 0) -> None:
        self.path, self._first, self._has_begun = path, first, False
        try:
            self._file = open(path, "ab")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise self._cannot_write(error) from error

    def write(self, row: StepRow, own: Mapping[str, float]) -> None:
        line = json.dumps({name: getattr(row, name) for name in _KEYS} | dict(own)) + "\n"
        try:
            if not self._has_begun:
                self._begin()
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            raise self._cannot_write(error) from error

    def _begin(self) -> None:
        self._has_begun = True
        there = os.fstat(self._file.fileno())
        if not stat.S_ISREG(there.st_mode) or not there.st_size:
            return
        path = Path(os.path.realpath(self.path))
        with replaced_file(path) as new:
            new.writelines(_lines_until(path, self._first))
        self._file.close()
        self._file = path.open("ab")

    def close(self) -> None:
        with suppress(OSError):  # failed writes were reported before
            self._file.close()

    def _cannot_write(self, error: OSError) -> PlanError:
        return PlanError(
            f"cannot write the log: {error.strerror}",
            where=Where(file=self.path),
            fix="free space there, or log to another place",
        )


def rows_until(path: str | None, step: int) -> list[StepRow]:
    """The steps up to ``step`` that an earlier run has logged; none without a log of them."""
    found = [json.loads(line) for line in _lines_until(path, step)] if path else []
    return [StepRow(**{name: value for name, value in row.items() if name in _KEYS}) for row in found]


def _lines_until(path: str | Path, step: int) -> Iterator[bytes]:
    """One after another: a log may be larger than memory."""
    if step and Path(path).is_file():
        with open(path, "rb") as file:
            for line in file:
                if _step_of(line) <= step:
                    yield line if line.endswith(b"\n") else line + b"\n"


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return inf  # a line that a kill cut short
