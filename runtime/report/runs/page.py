"""Runs side by side as one page that needs no other file: charts over steps, actions by stage, memory, and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from typing import Any

from markupsafe import Markup

from planner.report.page.bars import Bars, Row, bars_of
from planner.report.page.engine import render
from planner.report.page.palette import LINES
from planner.report.page.tables import tables_of
from runtime.report.runs.actions import action_times
from runtime.report.runs.chart import DASHES, HEIGHT, LEFT, NUM_COLOURS, RIGHT, WIDTH, chart
from runtime.report.runs.figures import FIGURES, Figure, Line, lines_of
from runtime.report.runs.memory import category_bars, over_actions
from runtime.report.runs.reading import Run
from runtime.report.runs.table import sections_of

_TIMES = ("measured", "planned")


def page(runs: Sequence[Run]) -> str:
    """The page as HTML, with a chart of every figure that some run has; dash and colour distinguish runs."""
    drawn = [(figure, lines) for figure in FIGURES if (lines := lines_of(figure, runs))]
    first, *others = tables_of(sections_of(runs))
    return render(
        "runs.html.j2",
        package="runtime.report.runs",
        title=f"Runs: {', '.join(run.name for run in runs)}",
        legend=[_legend(index, run.name) for index, run in enumerate(runs)],
        runs=first,
        charts=[_chart(figure, lines) for figure, lines in drawn],
        times=_time_bars(runs),
        memory=category_bars(runs),
        actions=[_chart(found.figure, found.lines, found.names) for found in over_actions(runs)],
        of_actions=[_legend(index, name) for index, name in enumerate(_TIMES)],
        tables=others,
        size={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT},
    )


def _legend(index: int, name: str) -> dict[str, Any]:
    return {"name": name, "colour": LINES[index % NUM_COLOURS], "dash": DASHES[index % len(DASHES)]}


def _chart(figure: Figure, lines: Sequence[Line], names: Sequence[str] = ()) -> dict[str, Any]:
    """``names``: of the points on the x axis, if numbers alone are unclear."""
    last = [(line.name, figure.format(line.points[-1][1])) for line in lines]
    told = [{"name": line.name, "points": [_told(figure, point) for point in line.points]} for line in lines]
    return {
        "title": figure.title,
        "unit": figure.unit,
        "along": figure.along,
        "names": json.dumps(names),
        "last": last,
        "svg": Markup(chart(figure, lines)),  # our own picture, its texts are escaped
        "points": json.dumps(told, ensure_ascii=True),
    }


def _told(figure: Figure, point: tuple[int, float]) -> tuple[int, str]:
    step, value = point
    return step, figure.format(value) if isfinite(value) else str(value)


def _time_bars(runs: Sequence[Run]) -> Bars | None:
    """Two bars for each kind of action of each stage: measured, and planned below it if there is a plan."""
    rows: list[Row] = []
    for run in runs:
        for time in action_times(run):
            name = f"{run.name}, stage {time.stage}, {time.kind}"
            for part, value in zip(_TIMES, (time.measured, time.planned), strict=True):
                if value is not None:
                    words = f"{value:.3f} ms"
                    rows.append((f"{name}, {part}", [(part, value, f"{name}, {part}: {words}")], words))
    note = "Medians over the traced steps, including waits."
    return bars_of("Time of actions, measured and planned", rows, _TIMES, note=note) if rows else None
