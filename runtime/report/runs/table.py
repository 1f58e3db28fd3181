"""Runs side by side as tables for a terminal, and as JSON for a script.

Actions: measured seconds of a trace beside planned ones, by stage. Memory: measured beside planned bytes, by category
and by action; pictures show the fullest rank of each pp rank, tables all ranks.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import floor, log, log10, nan
from statistics import median
from typing import Any

import numpy as np

from planner.report.section import Section
from planner.report.shapes import Bars, Row, bars_of
from planner.tables.sizes import format_bytes
from runtime.report.memory_rows import ActionMemory, Compared, MemoryReport
from runtime.report.runs.reading import KEYS, History, Point, RecordedRun, Series, figures_of

Format = Callable[[float], str]
_SMALL, _LARGE = 1e-3, 1e7  # numbers outside are printed with an exponent
COLUMNS = (
    "run", "steps", "first loss", "last loss", "lowest validation", "tokens/s", "s per step", "memory", "bubble",
    "planned bubble", "skipped",
)  # fmt: skip


def plain(value: float) -> str:
    """Return the number with four digits: 12,350 for 12345.6."""
    return f"{float(f'{value:.4g}'):,.7g}"


def share(value: float) -> str:
    return f"{value:.1%}"


def size(value: float) -> str:
    return format_bytes(round(value))


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure over steps: its field in the log, and its title. ``beside``: a second field, drawn as a thin line."""

    field: str
    title: str
    unit: str = ""
    format: Format = plain
    beside: str = ""
    beside_title: str = ""

    def unit_of(self, high: float) -> tuple[float, str]:
        """Return the unit of ticks up to ``high``, and its name: B, KiB, MiB and so on, %, or 1 without a name."""
        if self.format is share:
            return 0.01, "%"
        if self.format is not size:
            return 1.0, ""
        power = min(floor(log(max(high, 1.0), 1024)), 4)
        return 1024.0**power, f" {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


FIGURES = (
    Figure("loss", "Loss", "mean over tokens", beside="one_process_loss", beside_title="one process"),
    Figure("validation_loss", "Validation loss", "mean over tokens"),
    Figure("grad_norm", "Gradient norm"),
    Figure("lr", "Learning rate"),
    Figure("tokens_per_s", "Tokens per second"),
    Figure("step_seconds", "Seconds per step"),
    Figure("data_share", "Time waiting for data", "share of a step", share),
    Figure("bubble", "Bubble", "share of a step", share, beside="planned_bubble", beside_title="planned"),
    Figure("memory_bytes", "Memory", "peak of the fullest rank", size),
    Figure("peak_share", "FLOP/s per device", "share of its peak", share),
    Figure("loss_scale", "Loss scale"),
    Figure("imbalance", "Imbalance of experts", "tokens of the busiest expert over the mean"),
    Figure("dropped", "Dropped expert choices", "share", share),
)


def all_figures(runs: Sequence[RecordedRun]) -> tuple[Figure, ...]:
    """Return ``FIGURES``, then the figures of the user's own in any run, by name."""
    own = {name for run in runs for name in run.history.series} - KEYS
    return (*FIGURES, *(Figure(name, name) for name in sorted(own)))


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart. ``run``: index of its run; ``is_beside``: whether it shows the second field."""

    run: int
    name: str
    points: tuple[Point, ...]
    is_beside: bool = False


def lines_of(figure: Figure, runs: Sequence[RecordedRun]) -> list[Line]:
    """Return a line, or two with a second field, for each run that has the figure."""
    lines = []
    for index, run in enumerate(runs):
        for field, more in ((figure.field, ""), (figure.beside, figure.beside_title)):
            if field in run.history.series:
                name = f"{run.name}, {more}" if more else run.name
                lines.append(Line(index, name, run.history.series[field].points, bool(more)))
    return lines


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Return texts of equidistant round numbers, all with the same digits: 2.3000 beside 2.3005."""
    distance = ticks[1] - ticks[0] if len(ticks) > 1 and ticks[1] > ticks[0] else 1.0
    last = floor(log10(distance) + 1e-9)  # the exponent of the last digit
    most = max(map(abs, ticks))
    if most and not _SMALL <= most < _LARGE:
        digits = max(1, floor(log10(most)) - last + 1)
        return [f"{0.0 if abs(tick) < distance / 2 else tick:.{digits}g}" for tick in ticks]
    return [f"{tick:,.{max(0, -last)}f}" for tick in ticks]


def summary(run: RecordedRun) -> tuple[str, ...]:
    """Return the cells of ``COLUMNS``, "-" for missing figures. Times are medians without the first step."""
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


_ACTIONS = ("run", "stage", "action", "seen", "measured ms", "planned ms", "measured / planned")
PARTS = ("parameters", "gradients", "optimizer", "activations")  # "at the peak" contains activations
_RANKS = ("run", "rank", "category", "measured", "planned", "measured / planned")
_OF_ACTIONS = ("run", "pp rank", "rank", "action", "measured", "planned", "live at its peak")
_OWN = ("run", "figure", "first", "last", "lowest", "highest")


def sections_of(runs: Sequence[RecordedRun]) -> list[Section]:
    """Return a table of the runs, then those of own figures, times of actions and memory, without empty ones."""
    times = [time for run in runs for time in action_times(run)]
    cells = tuple(
        (t.run, str(t.stage), t.kind, str(t.count), f"{t.measured:.3f}", _or_none(t.planned, 3), _or_none(t.ratio, 2))
        for t in times
    )
    note = "medians over the traced steps, including waits"
    more = [
        Section("Figures of your own", _OWN, tuple(_own_figures(runs)), right=frozenset(_OWN[2:])),
        Section("Time of actions", _ACTIONS, cells, note, frozenset(_ACTIONS[3:])),
        *memory_sections(runs),
    ]
    first = Section(f"Runs ({len(runs)})", COLUMNS, tuple(map(summary, runs)), right=frozenset(COLUMNS[1:]))
    return [first, *(section for section in more if section.rows)]


def _own_figures(runs: Sequence[RecordedRun]) -> Iterator[tuple[str, ...]]:
    for run in runs:
        for name in sorted(run.history.series.keys() - KEYS):
            series = run.history.series[name]
            ends = (series.low, series.high) if series.num_finite else (nan, nan)
            yield (run.name, name, *map(plain, (series.points[0][1], series.points[-1][1], *ends)))


def _or_none(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def json_parts(runs: Sequence[RecordedRun]) -> Iterator[str]:
    """Yield JSON in parts, because a log may be larger than memory: every step of every run, the times of its actions,
    and the memory of its ranks; null: not measured."""
    yield "["
    for i, run in enumerate(runs):
        yield f'{"," if i else ""}\n  {{\n    "name": {json.dumps(run.name)},\n    "steps": ['
        for j, row in enumerate(run.rows):
            yield f"{',' if j else ''}\n      {_indented(figures_of(row), 6)}"
        actions = [dataclasses.asdict(time) for time in action_times(run)]
        yield f'\n    ],\n    "actions": {_indented(actions, 4)}'
        yield f',\n    "memory": {_indented(run.memory.to_dict() if run.memory else None, 4)}\n  }}'
    yield "\n]\n"


def _indented(value: Any, depth: int) -> str:
    return json.dumps(value, indent=2).replace("\n", "\n" + " " * depth)


@dataclass(frozen=True, slots=True)
class ActionTime:
    """Medians over all actions of one kind on one stage, in milliseconds. ``planned``: None if the trace lacks it."""

    run: str
    stage: int
    kind: str
    count: int
    measured: float
    planned: float | None

    @property
    def ratio(self) -> float | None:
        return self.measured / self.planned if self.planned else None


def action_times(run: RecordedRun) -> list[ActionTime]:
    """Return the times of actions by stage and kind; none without actions in a trace."""
    measured, planned = _milliseconds(run.trace, "measured"), _milliseconds(run.trace, "planned")
    return [
        ActionTime(run.name, *place, len(taken), median(taken), median(planned[place]) if place in planned else None)
        for place, taken in sorted(measured.items())
    ]


def _milliseconds(events: Sequence[dict[str, Any]], track: str) -> dict[tuple[int, str], list[float]]:
    """Return (stage, category) → durations of the actions of all ranks, on the track of this name."""
    tracks = {
        (e.get("pid"), e.get("tid"))
        for e in events
        if (e.get("ph"), e.get("name")) == ("M", "thread_name") and (e.get("args") or {}).get("name") == track
    }
    found: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    for event in events:
        args = event.get("args") or {}
        is_action = isinstance(args.get("stage"), int) and "microbatch" in args and "from_stage" not in args
        is_timed = event.get("ph") == "X" and isinstance(event.get("dur"), (int, float))
        if is_action and is_timed and (event.get("pid"), event.get("tid")) in tracks:
            found[args["stage"], str(event.get("cat"))].append(event["dur"] / 1000)
    return found


def fullest(report: MemoryReport) -> dict[int, int]:
    """Return pp rank → the rank that held the most bytes."""
    pp_ranks = {action.rank: action.pp_rank for action in report.actions}
    held = {rank: sum(row.measured for row in report.rows if _is_part_of(row, rank)) for rank in sorted(pp_ranks)}
    found: dict[int, int] = {}
    for rank in held:
        pp_rank = pp_ranks[rank]
        if pp_rank not in found or held[rank] > held[found[pp_rank]]:
            found[pp_rank] = rank
    return dict(sorted(found.items()))


def _is_part_of(row: Compared, rank: int) -> bool:
    return row.rank == rank and row.category in PARTS


def category_bars(runs: Sequence[RecordedRun]) -> Bars | None:
    """Return two bars for each pp rank of each run: measured, and planned below it."""
    rows: list[Row] = []
    for run, report in measured_runs(runs):
        for pp_rank, rank in fullest(report).items():
            of_rank = [row for row in report.rows if _is_part_of(row, rank)]
            for word, sizes in (
                ("measured", [r.measured for r in of_rank]),
                ("planned", [r.predicted for r in of_rank]),
            ):
                held = zip((row.category for row in of_rank), sizes, strict=True)
                named = [(part, size, f"{part}, {word}: {format_bytes(size)}") for part, size in held]
                rows.append((f"{run.name}, pp rank {pp_rank}, {word}", named, format_bytes(sum(sizes))))
    note = "The fullest rank of each pp rank; activations include logits, as saved by autograd at the peak."
    return bars_of("Memory, measured and planned", rows, PARTS, note=note) if rows else None


def measured_runs(runs: Sequence[RecordedRun]) -> list[tuple[RecordedRun, MemoryReport]]:
    return [(run, run.memory) for run in runs if run.memory is not None]


def memory_sections(runs: Sequence[RecordedRun]) -> list[Section]:
    """Return a table of ranks and categories, and one of the actions of the fullest rank of each pp rank."""
    ranks, actions = [], []
    for run, report in measured_runs(runs):
        ranks += [(run.name, *_cells(row)) for row in report.rows]
        drawn = set(fullest(report).values())
        actions += [(run.name, *_action_cells(action)) for action in report.actions if action.rank in drawn]
    note = "saved for microbatches in flight; the fullest rank of each pp rank"
    return [
        Section("Memory of ranks", _RANKS, tuple(ranks), "by `meshwright memory`", frozenset(_RANKS[3:])),
        Section("Memory by action", _OF_ACTIONS, tuple(actions), note, frozenset(_OF_ACTIONS[4:])),
    ]


def _cells(row: Compared) -> tuple[str, ...]:
    ratio = f"{row.measured / row.predicted:.3f}" if row.predicted else "-"
    return str(row.rank), row.category, format_bytes(row.measured), format_bytes(row.predicted), ratio


def _action_cells(action: ActionMemory) -> tuple[str, ...]:
    planned = "-" if action.predicted is None else format_bytes(action.predicted)
    place = (str(action.pp_rank), str(action.rank), action.action)
    return *place, format_bytes(action.measured), planned, format_bytes(action.live)
