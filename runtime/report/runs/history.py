"""The steps of a run, folded one by one as they are read, in memory that hardly grows with their number.

A series keeps a few hundred points: its first, its last, and of each stretch of steps the lowest and the highest, so
that no spike is lost. Stretches become twice as long whenever there are too many of them.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Sequence
from math import inf, isfinite

from runtime.report.step_row import StepRow

Point = tuple[int, float]

MOST_POINTS = 400  # of one line: about one a pixel
_TIMES = ("tokens_per_s", "step_seconds", "bubble")
_FIGURES = tuple(field.name for field in dataclasses.fields(StepRow) if field.name not in ("step", "slow_rank"))


class Series:
    """One figure over steps, added in their order. Values that are not finite count as points, in no fold."""

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
        if self._num_points() > self._most:
            self._double()

    def _num_points(self) -> int:
        return len(self._stretches) * (1 if self._width == 1 else 2)

    def _double(self) -> None:
        pairs = range(0, len(self._stretches), 2)
        is_odd = len(self._stretches) % 2
        self._stretches = [_ends([point for part in self._stretches[i : i + 2] for point in part]) for i in pairs]
        self._in_last += 0 if is_odd else self._width
        self._width *= 2

    @property
    def points(self) -> tuple[Point, ...]:
        """At most about ``most``, in the order of steps."""
        inside = [point for stretch in self._stretches for point in stretch]
        ends = [point for point in (self._first, self._last) if point is not None]
        kept = dict.fromkeys([*ends[:1], *inside, *ends[1:]])
        return tuple(sorted(kept, key=lambda point: point[0]))


def _ends(points: Sequence[Point]) -> list[Point]:
    """The lowest, the highest and the first that is not finite, in the order of steps."""
    if len(points) < 2:
        return list(points)
    finite = [point for point in points if isfinite(point[1])]
    broken = [point for point in points if not isfinite(point[1])][:1]
    ends = [min(finite, key=_value), max(finite, key=_value)] if finite else []
    return sorted(dict.fromkeys([*ends, *broken]), key=lambda point: point[0])


def _value(point: Point) -> float:
    return point[1]


class History:
    """All figures of a run. ``warm``: the finite values of ``_TIMES`` after the first step, which allocates memory and
    opens connections; of the first step if there is no other."""

    def __init__(self, rows: Iterable[StepRow]) -> None:
        self.series: dict[str, Series] = {}
        self.warm = {name: array("d") for name in _TIMES}  # 8 bytes a step: a median needs all of them
        self.num_steps = 0
        for row in rows:
            self._add(row)

    def _add(self, row: StepRow) -> None:
        if self.num_steps == 0:
            self.first = row
        self.last = row
        for name in _FIGURES:
            if (value := getattr(row, name)) is not None:
                self.series.setdefault(name, Series()).add(row.step, float(value))
        for name, values in self.warm.items():
            self._add_warm(values, getattr(row, name))
        self.num_steps += 1

    def _add_warm(self, values: array[float], value: float | None) -> None:
        if self.num_steps == 1:
            values[:] = array("d")
        if value is not None and isfinite(value):
            values.append(value)
