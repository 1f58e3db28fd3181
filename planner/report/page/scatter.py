"""A plot of points: time to the right, memory upwards, numbers beside the points that do not lie on one another.

Overlapping numbers move down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.report.shapes import Scale

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 860, 440, 84, 44, 28, 60  # pixels
MOST_CLOUD = 3000  # points without a number
_LINE = 14  # pixels of a number
_TICKS = 6


@dataclass(frozen=True, slots=True)
class Point:
    """``fill``: of the palette. ``label``: beside it; ``href``: the element with details; ``words``: its name."""

    x: float
    y: float
    fill: int
    label: str
    href: str
    words: str


@dataclass(frozen=True, slots=True)
class Placed:
    """In pixels; ``text``: the place of the label; ``moved``: a line leads there."""

    x: float
    y: float
    text: tuple[float, float]
    moved: bool
    point: Point


@dataclass(frozen=True, slots=True)
class Scatter:
    """``cloud``: a path of points without a number; ``limit``: (y, words) of a line."""

    points: tuple[Placed, ...]
    cloud: str
    right: tuple[tuple[float, str], ...]
    up: tuple[tuple[float, str], ...]
    limit: tuple[float, str] | None
    num_beyond: int


def scatter(
    points: Sequence[Point],
    cloud: Sequence[tuple[float, float]],
    limit: tuple[float, str] | None,
    right: Callable[[float], str],
    up: Callable[[float], str],
) -> Scatter:
    """``cloud``: (x, y) of the other points; points beyond the axes are counted. ``right``, ``up``: words of ticks."""
    x = Scale.around([p.x for p in points], LEFT, WIDTH - RIGHT)
    y = Scale.around([p.y for p in points] + ([limit[0]] if limit else []), HEIGHT - BOTTOM, TOP)
    inside = [(a, b) for a, b in cloud if x.holds(a) and y.holds(b)]
    dots = dict.fromkeys(f"M{x(a):.0f} {y(b):.0f}h0" for a, b in inside[:MOST_CLOUD])
    return Scatter(
        tuple(_placed(points, x, y)),
        "".join(dots),
        tuple((round(x(tick), 1), right(tick)) for tick in x.ticks(_TICKS)),
        tuple((round(y(tick), 1), up(tick)) for tick in y.ticks(_TICKS)),
        (round(y(limit[0]), 1), limit[1]) if limit else None,
        len(cloud) - len(inside[:MOST_CLOUD]),
    )


def _placed(points: Sequence[Point], x: Scale, y: Scale) -> list[Placed]:
    """Each point with a place for its label without other labels or points."""
    centres = [(x(p.x), y(p.y)) for p in points]
    taken: list[tuple[float, float]] = []
    found = []
    for point, (left, top) in zip(points, centres, strict=True):
        place = _free(left + 9, top + 4, [*taken, *((a - 6, b + 4) for a, b in centres if (a, b) != (left, top))])
        taken.append(place)
        moved = place != (left + 9, top + 4)
        found.append(Placed(round(left, 1), round(top, 1), (round(place[0], 1), round(place[1], 1)), moved, point))
    return found


def _free(left: float, top: float, taken: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The nearest place below or above, to the right, that nothing else has."""
    for step in range(24):
        for down in (step * _LINE, -step * _LINE):
            place = (left + 14 * (step > 0), top + down)
            is_free = all(abs(place[0] - a) > 22 or abs(place[1] - b) >= _LINE - 1 for a, b in taken)
            if is_free and TOP < place[1] < HEIGHT - BOTTOM:
                return place
    return left, top
