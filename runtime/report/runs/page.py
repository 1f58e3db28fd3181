"""Runs side by side as one page that needs no other file: charts over steps, memory, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from planner.report.page.engine import render
from planner.report.page.palette import LINES
from planner.report.page.tables import tables_of
from runtime.report.runs.chart import DASHES, NUM_COLOURS, chart
from runtime.report.runs.figures import FIGURES, Figure, Line, lines_of
from runtime.report.runs.memory import category_bars
from runtime.report.runs.reading import Run
from runtime.report.runs.table import sections_of


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
        memory=category_bars(runs),
        tables=others,
    )


def _legend(index: int, name: str) -> dict[str, Any]:
    return {"name": name, "colour": LINES[index % NUM_COLOURS], "dash": DASHES[index % len(DASHES)]}


def _chart(figure: Figure, lines: Sequence[Line]) -> dict[str, Any]:
    return {
        "title": figure.title,
        "unit": figure.unit,
        "last": [(line.name, figure.format(line.points[-1][1])) for line in lines],
        "svg": Markup(chart(figure, lines)),  # our own picture, its texts are escaped
    }
