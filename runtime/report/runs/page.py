"""Runs side by side as one page that needs no other file: a table of the runs, charts over steps, actions by stage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from runtime.report.runs.actions import ActionTime, action_times
from runtime.report.runs.chart import DASHES, NUM_COLOURS, chart
from runtime.report.runs.figures import COLUMNS, FIGURES, Figure, Line, lines_of, summary
from runtime.report.runs.reading import Run


def page(runs: Sequence[Run]) -> str:
    """The page as HTML, with a chart of every figure that some run has; dash and colour tell runs apart."""
    drawn = [(figure, lines) for figure in FIGURES if (lines := lines_of(figure, runs))]
    times = [time for run in runs for time in action_times(run)]
    longest = max((max(t.measured, t.planned or 0.0) for t in times), default=0.0) or 1.0
    return _template().render(
        runs=[_legend(index, run.name) for index, run in enumerate(runs)],
        columns=COLUMNS,
        rows=[summary(run) for run in runs],
        charts=[_chart(figure, lines) for figure, lines in drawn],
        actions=[_action(time, longest) for time in times],
        num_colours=NUM_COLOURS,
    )


def _template() -> Any:
    environment = Environment(
        loader=PackageLoader("runtime.report.runs"), autoescape=select_autoescape(default=True), trim_blocks=True
    )
    return environment.get_template("runs.html.j2")


def _legend(index: int, name: str) -> dict[str, Any]:
    return {"name": name, "colour": index % NUM_COLOURS, "dash": DASHES[index % len(DASHES)]}


def _chart(figure: Figure, lines: Sequence[Line]) -> dict[str, Any]:
    last = [(line.name, figure.format(line.points[-1][1])) for line in lines]
    told = [{"name": line.name, "points": [_told(figure, point) for point in line.points]} for line in lines]
    return {
        "title": figure.title,
        "unit": figure.unit,
        "last": last,
        "svg": Markup(chart(figure, lines)),  # our own picture, its texts are escaped
        "points": json.dumps(told, ensure_ascii=True),
    }


def _told(figure: Figure, point: tuple[int, float]) -> tuple[int, str]:
    step, value = point
    return step, figure.format(value) if isfinite(value) else str(value)


def _action(time: ActionTime, longest: float) -> dict[str, Any]:
    return {
        "run": time.run,
        "stage": time.stage,
        "kind": time.kind,
        "count": time.count,
        "measured": f"{time.measured:.3f}",
        "planned": "-" if time.planned is None else f"{time.planned:.3f}",
        "ratio": "-" if time.ratio is None else f"{time.ratio:.2f}",
        "measured_share": f"{100 * time.measured / longest:.1f}",
        "planned_share": f"{100 * (time.planned or 0.0) / longest:.1f}",
    }
