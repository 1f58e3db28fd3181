"""Runs side by side as one self-contained HTML page: charts over steps, memory, and tables.

Charts are plain SVG: ticks at round numbers, a dash pattern for each run, gaps at NaN and Inf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import isfinite
from typing import NamedTuple

from markupsafe import Markup

from planner.report.page.engine import LINES, render, tables_of
from planner.report.shapes import Scale, round_ticks
from runtime.report.runs.reading import RecordedRun
from runtime.report.runs.table import Figure, Line, all_figures, category_bars, lines_of, sections_of, tick_texts

WIDTH, HEIGHT = 360, 200  # as wide as a phone; a page scales it up, never down
_TOP, _BOTTOM = 10, 24
LETTER = 7.0  # maximum width of a digit in the page's font of 12 pixels
NUM_COLOURS = len(LINES)
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2")  # runs differ in more than colour


def page(runs: Sequence[RecordedRun]) -> str:
    """Return the page, with a chart of every figure that a run has; colour and dash distinguish runs."""
    charts = [
        {
            "title": figure.title,
            "unit": figure.unit,
            "last": [(line.name, figure.format(line.points[-1][1])) for line in lines],
            "svg": Markup(chart(figure, lines)),  # our own SVG, its texts are escaped
        }
        for figure in all_figures(runs)
        if (lines := lines_of(figure, runs))
    ]
    first, *others = tables_of(sections_of(runs))
    return render(
        "runs.html.j2",
        package="runtime.report.runs",
        title=f"Runs: {', '.join(run.name for run in runs)}",
        legend=[
            {"name": run.name, "colour": LINES[index % NUM_COLOURS], "dash": DASHES[index % len(DASHES)]}
            for index, run in enumerate(runs)
        ],
        runs=first,
        charts=charts,
        memory=category_bars(runs),
        tables=others,
    )


class Axes(NamedTuple):
    """The scales of a chart, and the ticks of both, with their texts."""

    x: Scale
    y: Scale
    steps: list[tuple[float, str]]
    values: list[tuple[float, str]]

    @classmethod
    def around(cls, figure: Figure, lines: Sequence[Line]) -> Axes:
        steps = [float(step) for line in lines for step, _ in line.points]
        values = [value for line in lines for _, value in line.points if isfinite(value)] or [0.0]
        low, high = min(values), max(values)
        room = (high - low) * 0.06 or abs(high) * 0.5 or 1.0
        floor_ = 0.0 if low >= 0 and low - room < 0 else low - room
        y = Scale(floor_, high + room, HEIGHT - _BOTTOM, _TOP)
        unit, name = figure.unit_of(y.high)
        ticks = round_ticks(y.low / unit, y.high / unit)
        texts = [f"{text}{name}" for text in tick_texts(ticks)]
        widest = LETTER * len(f"{max(steps):,.0f}")  # half of the text extends beyond the end
        x = Scale(min(steps), max(*steps, min(steps) + 1), 8 + LETTER * max(map(len, texts)), WIDTH - widest / 2 - 2)
        seen = x.ticks(min(5, max(2, int((x.end - x.start) / (widest + LETTER)))), whole=True)
        return cls(x, y, [(s, f"{s:,.0f}") for s in seen], [(t * unit, s) for t, s in zip(ticks, texts, strict=True)])


def chart(figure: Figure, lines: Sequence[Line]) -> str:
    """Return one SVG element; the page defines its colours (``planner.report.page.engine``)."""
    axes = Axes.around(figure, lines)
    words = f"{figure.title} over steps: {', '.join(line.name for line in lines)}"
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(words)}">',
        *_grid(axes),
        *(_path(line, axes) for line in lines),
        "</svg>",
    ]
    return "".join(parts)


def _grid(axes: Axes) -> Iterator[str]:
    left, right, foot = axes.x.start, axes.x.end, HEIGHT - _BOTTOM
    for value, text in axes.values:
        y = axes.y(value)
        yield f'<line class="grid" x1="{left:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="quiet end" x="{left - 6:g}" y="{y + 4:.1f}">{escape(text)}</text>'
    for step, text in axes.steps:
        x = axes.x(step)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{foot}" y2="{foot + 4}"/>'
        yield f'<text class="quiet middle" x="{x:.1f}" y="{foot + 17}">{text}</text>'


def _path(line: Line, axes: Axes) -> str:
    dash = DASHES[line.run % len(DASHES)]
    style = f"stroke:var(--{LINES[line.run % NUM_COLOURS]})" + (f";stroke-dasharray:{dash}" if dash else "")
    kind = "line beside" if line.is_beside else "line"
    stretches = _stretches(line, axes)
    moves = " ".join("M" + "L".join(f"{x} {y}" for x, y in stretch) for stretch in stretches)
    drawn = f'<path class="{kind}" style="{style}" d="{moves}"/>'
    dots = "".join(
        f'<circle class="dot" style="fill:var(--{LINES[line.run % NUM_COLOURS]})" cx="{x}" cy="{y}" r="2.5"/>'
        for ((x, y),) in (s for s in stretches if len(s) == 1)
    )
    return drawn + dots


def _stretches(line: Line, axes: Axes) -> list[list[tuple[str, str]]]:
    """Return the points in pixels, split at values that are not finite."""
    found: list[list[tuple[str, str]]] = [[]]
    for step, value in line.points:
        if isfinite(value):
            found[-1].append((f"{axes.x(step):.1f}", f"{axes.y(value):.1f}"))
        elif found[-1]:
            found.append([])
    return [stretch for stretch in found if stretch]
