"""The loss of a run as a picture. Needs the extra ``plot``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from passes.errors import PlanError, Where
from planner.files.atomic import replaced_file
from runtime.report.step_row import StepRow

SUFFIXES = (".png", ".svg", ".pdf")
_SIZE = (7.0, 4.0)  # inches
_FEW = 25  # steps that are also marked as points


def draw_curve(rows: Sequence[StepRow], path: str) -> None:
    """Write the picture atomically: loss by step, also that of one process and of validation if there are any.

    Raises PlanError, naming the file, if it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, points, style in _lines(rows):
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (mean over tokens)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    _write(figure, Path(path))


def _lines(rows: Sequence[StepRow]) -> list[tuple[str, list[tuple[int, float]], dict[str, Any]]]:
    """The drawn lines: label, points, and style. The single process is dashed, so that equal lines are both visible."""
    marker = "o" if len(rows) <= _FEW else None
    wanted = (
        ("training", "loss", {"color": "C0", "linewidth": 2.0, "marker": marker, "markersize": 3.5}),
        ("one process", "one_process_loss", {"color": "black", "linewidth": 1.2, "linestyle": (0, (3, 3))}),
        ("validation", "validation_loss", {"color": "C1", "linewidth": 1.6, "marker": "s", "markersize": 4.0}),
    )
    found = []
    for label, name, style in wanted:
        points = [(row.step, value) for row in rows if (value := getattr(row, name)) is not None]
        if points:
            found.append((label, points, style))
    return found


def _write(figure: Any, path: Path) -> None:
    try:
        with replaced_file(Path(os.path.realpath(path))) as file:
            figure.savefig(file, dpi=150, format=path.suffix.lower().removeprefix("."))
    except OSError as error:
        raise PlanError(
            f"cannot write the picture: {error.strerror}", where=Where(file=str(path)), fix="give a writable file"
        ) from error
