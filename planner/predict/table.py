"""Predictions as tables, and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from planner.cost.step_time import PARTS
from planner.predict.predict import Predicted
from planner.predict.runs import Unread
from planner.predict.summary import Summary, summaries
from planner.report.section import Section
from planner.search.losers import gigabytes, percent, seconds_text

_FITS = {True: "yes", False: "no", None: "-"}


def sections(found: Sequence[Predicted | Unread]) -> list[Section]:
    """The runs, those with errors, and a row for each sweep."""
    predicted = [row for row in found if isinstance(row, Predicted)]
    unread = [(row.name, row.why) for row in found if isinstance(row, Unread)]
    parts = [_runs(predicted)] if predicted else []
    if unread:
        parts.append(Section("Runs without a prediction", ("run", "reason"), tuple(unread)))
    return [*parts, _sweeps(summaries(predicted))] if predicted else parts


def _runs(predicted: Sequence[Predicted]) -> Section:
    columns = ("run", "measured", "predicted", "between", "error", "memory", "of", "fits", "did")
    rows = []
    for p in predicted:
        measured = p.run.measured
        rows.append(
            (p.run.name, seconds_text(measured.seconds) if measured.seconds else "-",
             seconds_text(p.candidate.seconds), " and ".join(map(seconds_text, p.candidate.estimate.cost.range)),
             _signed(p.error), gigabytes(p.candidate.fullest.total), gigabytes(p.usable), _FITS[p.fits],
             _FITS[measured.ran])
        )  # fmt: skip
    note = "seconds of a step; memory of the fullest rank, of what a process may fill"
    return Section("Predicted beside measured", columns, tuple(rows), note, frozenset(columns[1:7]))


def _sweeps(found: Sequence[Summary]) -> Section:
    columns = (
        "sweep",
        "runs",
        "timed",
        "median error",
        "bias",
        "in range",
        "rank",
        "chosen",
        "behind",
        "fits",
        "memory",
    )
    rows = tuple(
        (s.sweep or "all", str(s.runs), str(s.timed), _share(s.error), _signed(s.bias),
         "-" if s.within is None else f"{s.within} of {s.timed}",
         "-" if s.correlation is None else f"{s.correlation:.2f}", s.chosen or "-", _share(s.behind),
         f"{s.fits_right} of {s.judged}" if s.judged else "-", _share(s.memory_error))
        for s in found
    )  # fmt: skip
    note = (
        "rank: Spearman's correlation of predicted and measured seconds; chosen: the layout that a search would take "
        "of those that were timed; behind: how much slower it was than the fastest; fits: said rightly"
    )
    return Section("Sweeps", columns, rows, note, frozenset(columns[1:7]))


def _share(value: float | None) -> str:
    return "-" if value is None else percent(value)


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def to_dict(found: Sequence[Predicted | Unread]) -> dict[str, Any]:
    """The form of ``--format json``; docs/prediction.md describes it."""
    predicted = [row for row in found if isinstance(row, Predicted)]
    return {
        "runs": [_run(row) for row in found],
        "sweeps": [asdict(summary) for summary in summaries(predicted)],
    }


def _run(row: Predicted | Unread) -> dict[str, Any]:
    if isinstance(row, Unread):
        return {"name": row.name, "sweep": row.sweep, "error": row.why}
    cost, measured = row.candidate.estimate.cost, row.run.measured
    return {
        "name": row.run.name,
        "sweep": row.run.sweep,
        "layout": str(row.candidate.point),
        "measured": measured.model_dump(mode="json"),
        "step_seconds": cost.step_seconds,
        "step_seconds_range": list(cost.range),
        "seconds_error": row.error,
        "memory_bytes": row.candidate.fullest.total,
        "usable_bytes": int(row.usable),
        "memory_error": row.memory_error,
        "fits": row.fits,
        "cost": {part: getattr(cost, part) for part in PARTS},
    }
