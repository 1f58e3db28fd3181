"""Read logged runs: a log or a directory of logs becomes runs, with the traces and memory reports beside them.

Steps are folded one by one as they are read, in memory that hardly grows with their number. A series keeps a few
hundred points: the first, the last, and the lowest and the highest of each stretch of steps, so that no spike is lost.
The length of a stretch doubles whenever there are too many stretches.
"""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import inf, isfinite
from operator import itemgetter
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from passes.errors import PlanError
from planner.files.text import MIB, is_file, lines_of, read_text, shorten
from runtime.report.log import StepRow
from runtime.report.memory_rows import MemoryReport

FIX = "write one with `meshwright train … --log FILE.jsonl`"
_MOST_OF_A_LINE = MIB
KEYS = {each.name for each in dataclasses.fields(StepRow)}
_NEEDED = {each.name for each in dataclasses.fields(StepRow) if each.default is dataclasses.MISSING}
Point = tuple[int, float]
MOST_POINTS = 400  # maximum number of points of a line, about one per pixel
_TIMES = ("tokens_per_s", "step_seconds", "bubble")
_FIGURES = tuple(each.name for each in dataclasses.fields(StepRow) if each.name not in ("step", "slow_rank"))
LOG = ".jsonl"
_MOST_BYTES = 1024 * MIB
_adapter = cache(TypeAdapter)
_MOVE = "write it again with this version, or move it away"


@dataclass(frozen=True, slots=True)
class OwnRow(StepRow):
    """A step with the user's ``own`` figures: of --metric, of further validation sets, or of ``run.log``."""

    own: Mapping[str, float] = field(default_factory=dict)


def figures_of(row: StepRow) -> dict[str, Any]:
    """Return all figures of a step by their keys in the log."""
    own = dict(row.own) if isinstance(row, OwnRow) else {}
    return {each.name: getattr(row, each.name) for each in dataclasses.fields(StepRow)} | own


@dataclass(frozen=True)
class RecordedRun:
    """One run. ``rows``: its steps, read again at each iteration. ``trace`` and ``memory``: the events of the trace and
    the memory report beside its log, if they exist.
    """

    name: str
    rows: Iterable[StepRow]
    trace: tuple[dict[str, Any], ...] = ()
    memory: MemoryReport | None = None

    @cached_property
    def history(self) -> History:
        """The folded steps, read at the first use. Raises PlanError if the log is damaged."""
        return History(self.rows)


@dataclass(frozen=True, slots=True)
class Rows:
    """The steps of a log, without a truncated last line. Each iteration reads the file, and raises PlanError, with the
    line, if it is damaged or has no step.
    """

    log: Path

    def __iter__(self) -> Iterator[StepRow]:
        num_steps = 0
        for row in _rows(self.log):
            num_steps += 1
            yield row
        if not num_steps:
            raise PlanError("the log has no steps", where=shorten(self.log), fix=FIX)


def read_runs(paths: Sequence[Path]) -> list[RecordedRun]:
    """Return the runs of logs and of directories of logs. Raises PlanError for other paths, and for damaged files."""
    logs = [log for path in paths for log in _logs_at(path)]
    names = names_of(logs)
    runs = [
        RecordedRun(name, Rows(log), trace_beside(log), memory_beside(log))
        for log, name in zip(logs, names, strict=True)
    ]
    for run in runs:
        run.history  # noqa: B018 - reads the log, to refuse a damaged one before any output
    return runs


def names_of(logs: Sequence[Path]) -> list[str]:
    """Return the shortest distinct names: the stem of the file, with as many folders as needed."""
    parts = [[*log.resolve().parts[1:-1], log.stem] for log in logs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{part[-1]} ({i})" for i, part in enumerate(parts)]


def _logs_at(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    logs = sorted(path.glob(f"*{LOG}"))
    if not logs:
        raise PlanError("the directory has no step logs (*.jsonl)", where=shorten(path), fix=FIX)
    return logs


def _rows(log: Path) -> Iterator[StepRow]:
    for number, (line, is_ended) in enumerate(lines_of(log, "log", most_bytes=_MOST_OF_A_LINE, fix=FIX), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            if not is_ended:  # the last line, which a kill truncated
                return
            raise _damaged(log, number, f"this is not JSON: {shorten(line, 60)}") from None
        yield _row(log, number, values)


def _row(log: Path, number: int, values: Any) -> StepRow:
    if not isinstance(values, dict):
        raise _damaged(log, number, "this is not a JSON object")
    own = {name: value for name, value in values.items() if name not in KEYS}
    missing = sorted(_NEEDED - values.keys())
    foreign = sorted(name for name, value in own.items() if not isinstance(value, int | float))
    if missing or foreign:
        problems = [*_listed("misses", missing), *_listed("has the unknown", foreign)]
        words = f"another version or another program has written this log: a step {', and '.join(problems)}"
        raise PlanError(words, where=_at(log, number), fix="report it with the version that wrote it")
    known = {name: value for name, value in values.items() if name in KEYS}
    try:
        return _adapter(OwnRow if own else StepRow).validate_python(known | ({"own": own} if own else {}))
    except ValidationError as error:
        raise _damaged(log, number, _first_of(error)) from None


def _first_of(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _listed(verb: str, names: Iterable[str]) -> list[str]:
    listed = ", ".join(shorten(name, 40) for name in names)
    return [f"{verb} {shorten(listed, 200)}"] if listed else []


def _damaged(log: Path, number: int, words: str) -> PlanError:
    return PlanError(f"the log is damaged: {words}", where=_at(log, number), fix="provide an undamaged copy of the log")


def _at(log: Path, number: int) -> str:
    return f"{shorten(log)}, line {number}"


class Series:
    """One figure over steps, added in order. NaN and Inf are points, but do not count in lowest, highest and total."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most, self._width, self._in_last = most, 1, 0
        self._stretches: list[list[Point]] = []
        self._first: Point | None = None
        self._last: Point | None = None
        self.low, self.high, self.total, self.num_finite = inf, -inf, 0.0, 0

    def add(self, step: int, value: float) -> None:
        point = (step, value)
        self._first, self._last = self._first or point, point
        if isfinite(value):
            self.low, self.high = min(self.low, value), max(self.high, value)
            self.total, self.num_finite = self.total + value, self.num_finite + 1
        if not self._stretches or self._in_last == self._width:
            self._stretches.append([])
            self._in_last = 0
        self._stretches[-1] = _ends([*self._stretches[-1], point])
        self._in_last += 1
        if len(self._stretches) * (1 if self._width == 1 else 2) > self._most:
            self._double()

    def _double(self) -> None:
        pairs = range(0, len(self._stretches), 2)
        is_odd = len(self._stretches) % 2
        self._stretches = [_ends([point for part in self._stretches[i : i + 2] for point in part]) for i in pairs]
        self._in_last += 0 if is_odd else self._width
        self._width *= 2

    @property
    def points(self) -> tuple[Point, ...]:
        """At most about ``most`` points, in the order of steps."""
        inside = [point for stretch in self._stretches for point in stretch]
        ends = [point for point in (self._first, self._last) if point is not None]
        kept = dict.fromkeys([*ends[:1], *inside, *ends[1:]])
        return tuple(sorted(kept, key=itemgetter(0)))


def _ends(points: Sequence[Point]) -> list[Point]:
    """Return the lowest, the highest and the first non-finite point, in the order of steps."""
    if len(points) < 2:
        return list(points)
    finite = [point for point in points if isfinite(point[1])]
    broken = [point for point in points if not isfinite(point[1])][:1]
    ends = [min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))] if finite else []
    return sorted(dict.fromkeys([*ends, *broken]), key=itemgetter(0))


class History:
    """All figures of a run. ``warm``: the finite values of ``_TIMES``, without the first of several steps, which
    allocates memory and opens connections."""

    def __init__(self, rows: Iterable[StepRow]) -> None:
        self.series: dict[str, Series] = {}
        self.warm = {name: array("d") for name in _TIMES}  # 8 bytes per step, because a median needs all values
        self.num_steps = 0
        for row in rows:
            self._add(row)

    def _add(self, row: StepRow) -> None:
        if self.num_steps == 0:
            self.first = row
        self.last = row
        own = row.own if isinstance(row, OwnRow) else {}
        for name, value in (*((name, getattr(row, name)) for name in _FIGURES), *own.items()):
            if value is not None:
                self.series.setdefault(name, Series()).add(row.step, float(value))
        for name, values in self.warm.items():
            if self.num_steps == 1:
                values[:] = array("d")
            if (value := getattr(row, name)) is not None and isfinite(value):
                values.append(value)
        self.num_steps += 1


def trace_beside(log: Path) -> tuple[dict[str, Any], ...]:
    """Return the events of NAME.json beside NAME.jsonl, or of trace.json in a directory with one log; else none.

    Raises PlanError for a file that is not JSON.
    """
    for path in _files(log, ".json", "trace.json"):
        events = _object(path, "trace").get("traceEvents")
        if isinstance(events, list):
            return tuple(event for event in events if isinstance(event, dict))
    return ()


def memory_beside(log: Path) -> MemoryReport | None:
    """Return the report of `meshwright memory --format json` in NAME.memory.json, or in memory.json in a directory with
    one log. Raises PlanError for a file of another version.
    """
    for path in _files(log, ".memory.json", "memory.json"):
        values = _object(path, "report of memory")
        try:
            return TypeAdapter(MemoryReport).validate_python(values)
        except ValidationError as error:
            words = f"this is not a memory report of this version: {shorten(_first_of(error), 200)}"
            fix = f"{_MOVE}: meshwright memory MODEL SPEC --format json > {shorten(path.name)}"
            raise PlanError(words, where=shorten(path), fix=fix) from None
    return None


def _files(log: Path, suffix: str, shared: str) -> list[Path]:
    """Return the existing files among NAME + ``suffix`` and, if the directory has one log, ``shared``."""
    is_alone = len(list(log.parent.glob(f"*{LOG}"))) == 1
    names = [log.with_suffix(suffix), *([log.with_name(shared)] if is_alone else [])]
    return [path for path in names if is_file(path)]


def _object(path: Path, what: str) -> dict[str, Any]:
    text = read_text(path, what, most_bytes=_MOST_BYTES, fix=_MOVE)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise PlanError(f"the {what} is damaged: it is not JSON", where=shorten(path), fix=_MOVE) from None
    return values if isinstance(values, dict) else {}
