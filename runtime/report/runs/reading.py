"""Read logged runs: a log or a directory of logs becomes rows, or one error."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from passes.errors import PlanError
from planner.files.text import MIB, lines_of, shorten
from runtime.report.memory_rows import MemoryReport
from runtime.report.runs.beside import LOG, memory_beside, trace_beside
from runtime.report.runs.history import History
from runtime.report.step_row import StepRow

FIX = "write one with `meshwright train … --log FILE.jsonl`"
_MOST_OF_A_LINE = MIB
_KEYS = {field.name for field in dataclasses.fields(StepRow)}
_NEEDED = {field.name for field in dataclasses.fields(StepRow) if field.default is dataclasses.MISSING}


@dataclass(frozen=True)
class Run:
    """One run. ``rows``: its steps, read again at each iteration. ``trace``: the events of a trace that lies beside its
    log, if one does; ``memory``: the memory of its ranks, if that does.
    """

    name: str
    rows: Iterable[StepRow]
    trace: tuple[dict[str, Any], ...] = ()
    memory: MemoryReport | None = None

    @cached_property
    def history(self) -> History:
        """Its steps, folded at the first use. Raises PlanError if the log is damaged."""
        return History(self.rows)


@dataclass(frozen=True, slots=True)
class Rows:
    """The steps of a log; a truncated last line is left out. Each iteration reads the file and raises PlanError, naming
    the line, if it is damaged or holds no step.
    """

    log: Path

    def __iter__(self) -> Iterator[StepRow]:
        num_steps = 0
        for row in _rows(self.log):
            num_steps += 1
            yield row
        if not num_steps:
            raise PlanError("the log has no steps", where=shorten(self.log), fix=FIX)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The logs among ``paths``, and those in directories among them. Raises PlanError for a path that is neither."""
    logs = [log for path in paths for log in _logs_at(path)]
    names = names_of(logs)
    runs = [Run(name, Rows(log), trace_beside(log), memory_beside(log)) for log, name in zip(logs, names, strict=True)]
    for run in runs:
        run.history  # noqa: B018 - reads the log, so that a damaged one is refused before anything is written
    return runs


def names_of(logs: Sequence[Path]) -> list[str]:
    """The shortest distinct names: the stem of the file, with folders above it as needed."""
    parts = [[*log.resolve().parts[1:-1], log.stem] for log in logs]
    for depth in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-depth:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return [f"{part[-1]} ({i})" for i, part in enumerate(parts)]


def _logs_at(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob(f"*{LOG}"))
    if not found:
        raise PlanError("the directory has no step logs (*.jsonl)", where=shorten(path), fix=FIX)
    return found


def _rows(log: Path) -> Iterator[StepRow]:
    for number, (line, is_ended) in enumerate(lines_of(log, "log", most_bytes=_MOST_OF_A_LINE, fix=FIX), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            if not is_ended:  # the last one
                return
            raise _damaged(log, number, f"this is not JSON: {shorten(line, 60)}") from None
        yield _row(log, number, values)


def _row(log: Path, number: int, values: Any) -> StepRow:
    if not isinstance(values, dict):
        raise _damaged(log, number, "this is not a JSON object")
    missing, foreign = sorted(_NEEDED - values.keys()), sorted(values.keys() - _KEYS)
    if missing or foreign:
        told = [*_told("misses", missing), *_told("has the unknown", foreign)]
        words = f"another version or another program has written this log: a step {', and '.join(told)}"
        raise PlanError(words, where=_at(log, number), fix="report it with the version that wrote it")
    try:
        return _adapter().validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        words = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise _damaged(log, number, words) from None


@cache
def _adapter() -> TypeAdapter[StepRow]:
    return TypeAdapter(StepRow)


def _told(verb: str, names: Iterable[str]) -> list[str]:
    listed = ", ".join(shorten(name, 40) for name in names)
    return [f"{verb} {shorten(listed, 200)}"] if listed else []


def _damaged(log: Path, number: int, words: str) -> PlanError:
    return PlanError(f"the log is damaged: {words}", where=_at(log, number), fix="provide an undamaged copy of the log")


def _at(log: Path, number: int) -> str:
    return f"{shorten(log)}, line {number}"
