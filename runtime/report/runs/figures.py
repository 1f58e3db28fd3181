"""Charts and summary of runs: figures over steps, their units, and one row per run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor, log, log10

import numpy as np

from planner.tables.sizes import format_bytes
from runtime.report.runs.history import History, Point, Series
from runtime.report.runs.reading import Run

Format = Callable[[float], str]


_SMALL, _LARGE = 1e-3, 1e7  # beyond them with an exponent


def plain(value: float) -> str:
    """Four digits: 12,350 for 12345.6."""
    return f"{float(f'{value:.4g}'):,.7g}"


def share(value: float) -> str:
    return f"{value:.1%}"


def size(value: float) -> str:
    return format_bytes(round(value))


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure over steps: its field in the log, and its title. ``beside``: a second field, drawn thin."""

    field: str
    title: str
    unit: str = ""
    format: Format = plain
    beside: str = ""
    beside_title: str = ""

    def unit_of(self, high: float) -> tuple[float, str]:
        """In which ticks up to ``high`` are round numbers, and its name: KiB, MiB and so on, or a hundredth."""
        if self.format is share:
            return 0.01, "%"
        if self.format is not size:
            return 1.0, ""
        power = min(floor(log(max(high, 1.0), 1024)), 4)
        return 1024.0**power, f" {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


FIGURES = (
    Figure("loss", "Loss", "mean over tokens", plain, "one_process_loss", "one process"),
    Figure("validation_loss", "Validation loss", "mean over tokens"),
    Figure("grad_norm", "Gradient norm"),
    Figure("lr", "Learning rate"),
    Figure("tokens_per_s", "Tokens per second"),
    Figure("step_seconds", "Seconds per step"),
    Figure("data_share", "Time waiting for data", "share of a step", share),
    Figure("bubble", "Bubble", "share of a step", share, "planned_bubble", "planned"),
    Figure("memory_bytes", "Memory", "peak of the fullest rank", size),
    Figure("peak_share", "FLOP/s per device", "share of its peak", share),
    Figure("loss_scale", "Loss scale"),
    Figure("imbalance", "Imbalance of experts", "tokens of the busiest expert over the mean"),
    Figure("dropped", "Dropped expert choices", "share", share),
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
            if field in run.history.series:
                name = f"{run.name}, {more}" if more else run.name
                found.append(Line(index, name, run.history.series[field].points, bool(more)))
    return found


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Round numbers in equal distances, each with all of its digits: 2.3000 beside 2.3005."""
    distance = ticks[1] - ticks[0] if len(ticks) > 1 and ticks[1] > ticks[0] else 1.0
    last = floor(log10(distance) + 1e-9)  # the place of the last digit
    most = max(map(abs, ticks))
    if most and not _SMALL <= most < _LARGE:
        digits = max(1, floor(log10(most)) - last + 1)
        return [f"{0.0 if abs(tick) < distance / 2 else tick:.{digits}g}" for tick in ticks]
    return [f"{tick:,.{max(0, -last)}f}" for tick in ticks]


# ---- one line a run


COLUMNS = (
    "run", "steps", "first loss", "last loss", "lowest validation", "tokens/s", "s per step", "memory", "bubble",
    "planned bubble", "skipped",
)  # fmt: skip


def summary(run: Run) -> tuple[str, ...]:
    """The cells of ``COLUMNS``; - if the run has no such figure. Times are medians without the first step."""
    history = run.history
    first, last, warm = history.first, history.last, history.warm
    return (
        run.name,
        f"{first.step} to {last.step}",
        plain(first.loss),
        plain(last.loss),
        _of(history, "validation_loss", lambda series: plain(series.low)),
        f"{np.median(warm['tokens_per_s']):,.0f}" if warm["tokens_per_s"] else "-",
        plain(float(np.median(warm["step_seconds"]))) if warm["step_seconds"] else "-",
        _of(history, "memory_bytes", lambda series: size(series.high)),
        share(float(np.mean(warm["bubble"]))) if warm["bubble"] else "-",
        _of(history, "planned_bubble", lambda series: share(series.total / series.num_finite)),
        str(round(history.series["skipped"].total)),
    )


def _of(history: History, field: str, shown: Callable[[Series], str]) -> str:
    series = history.series.get(field)
    return shown(series) if series is not None and series.num_finite else "-"
