"""What is drawn and summed up of runs: which figures over steps, in which units, and one line a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import mean, median

from planner.tables.sizes import format_bytes
from runtime.report.runs.reading import Run
from runtime.report.step_row import StepRow

Point = tuple[int, float]
Format = Callable[[float], str]

MOST_POINTS = 400  # of one line: about one a pixel
_WARM = 1  # steps at the start that time nothing: allocations, first messages


def plain(value: float) -> str:
    return f"{value:.4g}"


def share(value: float) -> str:
    return f"{value:.1%}"


def size(value: float) -> str:
    return format_bytes(round(value))


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure over steps: its field in the log, and what a reader calls it. ``beside``: a second field, drawn thin.

    ``along``: what it is over, if not steps. ``is_bytes``: its ticks are round in KiB, MiB and so on. ``from_zero``: so
    that heights compare.
    """

    field: str
    title: str
    unit: str = ""
    format: Format = plain
    beside: str = ""
    beside_title: str = ""
    along: str = "step"
    is_bytes: bool = False
    from_zero: bool = False


FIGURES = (
    Figure("loss", "Loss", "mean over tokens", plain, "one_process_loss", "one process"),
    Figure("validation_loss", "Validation loss", "mean over tokens"),
    Figure("grad_norm", "Norm of the gradient"),
    Figure("lr", "Learning rate"),
    Figure("tokens_per_s", "Tokens a second"),
    Figure("step_seconds", "Seconds a step"),
    Figure("data_share", "Time spent on data", "share of a step", share),
    Figure("bubble", "Bubble", "share of a step", share, "planned_bubble", "planned"),
    Figure("memory_bytes", "Memory", "most that a rank has held", size, is_bytes=True),
    Figure("peak_share", "FLOP/s of a device", "share of its peak", share),
    Figure("loss_scale", "Loss scale"),
    Figure("imbalance", "Imbalance of experts", "most tokens over the mean"),
    Figure("dropped", "Choices of experts without a slot", "share", share),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart. ``run``: its position among the runs; ``is_beside``: of the second field."""

    run: int
    name: str
    points: tuple[Point, ...]
    is_beside: bool = False


def lines_of(figure: Figure, runs: Sequence[Run]) -> list[Line]:
    """A line for each run that has the figure; a figure that no run has gives none."""
    found = []
    for index, run in enumerate(runs):
        for field, more in ((figure.field, ""), (figure.beside, figure.beside_title)):
            points = [(r.step, float(v)) for r in run.rows if field and (v := getattr(r, field)) is not None]
            if points:
                name = f"{run.name}, {more}" if more else run.name
                found.append(Line(index, name, thinned(points), bool(more)))
    return found


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> tuple[Point, ...]:
    """At most about ``most`` points: of each stretch of steps the lowest and the highest, so that no spike is lost."""
    if len(points) <= most:
        return tuple(points)
    stretch = -(-len(points) // (most // 2))
    kept: list[Point] = [points[0]]
    for start in range(0, len(points), stretch):
        part = [p for p in points[start : start + stretch] if isfinite(p[1])]
        broken = [p for p in points[start : start + stretch] if not isfinite(p[1])][:1]
        ends = {min(part, key=_value), max(part, key=_value)} if part else set[Point]()
        kept += sorted({*ends, *broken} - {kept[-1]})
    return (*kept, points[-1]) if kept[-1] != points[-1] else tuple(kept)


def _value(point: Point) -> float:
    return point[1]


# ---- one line a run


COLUMNS = (
    "run", "steps", "first loss", "last loss", "lowest validation", "tokens/s", "s a step", "memory", "bubble",
    "planned bubble", "skipped",
)  # fmt: skip


def summary(run: Run) -> tuple[str, ...]:
    """The cells of ``COLUMNS``; - where the run has no such figure. Times are medians without the first step."""
    rows = run.rows
    warm = rows[_WARM:] or rows
    skipped = sum(row.skipped for row in rows)
    return (
        run.name,
        f"{rows[0].step} to {rows[-1].step}",
        plain(rows[0].loss),
        plain(rows[-1].loss),
        _of(rows, "validation_loss", min, plain),
        _of(warm, "tokens_per_s", median, lambda v: f"{v:,.0f}"),
        _of(warm, "step_seconds", median, plain),
        _of(rows, "memory_bytes", max, size),
        _of(warm, "bubble", mean, share),
        _of(rows, "planned_bubble", mean, share),
        str(skipped),
    )


def _of(rows: Sequence[StepRow], field: str, fold: Callable[[list[float]], float], shown: Format) -> str:
    values = [float(v) for row in rows if (v := getattr(row, field)) is not None and isfinite(v)]
    return shown(fold(values)) if values else "-"
