"""Measured and planned memory of ranks: bars by category, and tables by category and by action.

Of each pp rank the one rank that held the most is drawn; the table has all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.report.page.bars import Bars, Row, bars_of
from planner.report.section import Section
from planner.tables.sizes import format_bytes
from runtime.report.memory_rows import ActionMemory, Compared, MemoryReport
from runtime.report.runs.reading import Run

PARTS = ("parameters", "gradients", "optimizer", "activations")  # "at the peak" has activations in it
_RANKS = ("run", "rank", "category", "measured", "planned", "measured / planned")
_ACTIONS = ("run", "pp rank", "rank", "action", "measured", "planned", "live at its peak")


def fullest(report: MemoryReport) -> dict[int, int]:
    """Of each pp rank the rank that held the most."""
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


def category_bars(runs: Sequence[Run]) -> Bars | None:
    """Two bars for each pp rank of each run: measured, and planned below it."""
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


def measured_runs(runs: Sequence[Run]) -> list[tuple[Run, MemoryReport]]:
    return [(run, run.memory) for run in runs if run.memory is not None]


def memory_sections(runs: Sequence[Run]) -> list[Section]:
    """A table of ranks and categories, and one of the actions of each pp rank; none without such a report."""
    ranks, actions = [], []
    for run, report in measured_runs(runs):
        ranks += [(run.name, *_cells(row)) for row in report.rows]
        drawn = set(fullest(report).values())
        actions += [(run.name, *_action_cells(action)) for action in report.actions if action.rank in drawn]
    note = "saved for microbatches in flight; the fullest rank of each pp rank"
    found = [
        Section("Memory of ranks", _RANKS, tuple(ranks), "by `meshwright memory`", frozenset(_RANKS[3:])),
        Section("Memory by action", _ACTIONS, tuple(actions), note, frozenset(_ACTIONS[4:])),
    ]
    return [section for section in found if section.rows]


def _cells(row: Compared) -> tuple[str, ...]:
    ratio = f"{row.measured / row.predicted:.3f}" if row.predicted else "-"
    return str(row.rank), row.category, format_bytes(row.measured), format_bytes(row.predicted), ratio


def _action_cells(action: ActionMemory) -> tuple[str, ...]:
    planned = "-" if action.predicted is None else format_bytes(action.predicted)
    place = (str(action.pp_rank), str(action.rank), action.action)
    return *place, format_bytes(action.measured), planned, format_bytes(action.live)
