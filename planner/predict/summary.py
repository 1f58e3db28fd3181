"""How good the predictions of a sweep are: errors, order, and the layout that they would choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from scipy.stats import spearmanr

from planner.predict.predict import Predicted
from planner.search.search import simplest_first

_FEWEST = 3  # timed runs that have an order


@dataclass(frozen=True)
class Summary:
    """Of the runs of one sweep. None: nothing was measured, or too little.

    ``error``: median of the absolute relative errors of seconds; ``bias``: their median with its sign.
    ``correlation``: Spearman's, of measured and predicted seconds. ``behind``: by how much the layout that is chosen by
    the predictions is slower than the fastest measured. ``memory_error``: as ``error``, of bytes.
    """

    sweep: str
    runs: int
    timed: int
    error: float | None = None
    bias: float | None = None
    within: int | None = None
    correlation: float | None = None
    chosen: str = ""
    behind: float | None = None
    judged: int = 0
    fits_right: int = 0
    memory_error: float | None = None


def summaries(predicted: Sequence[Predicted]) -> list[Summary]:
    """One for each sweep, in the order of the file."""
    sweeps = dict.fromkeys(p.run.sweep for p in predicted)
    return [_summary(sweep, [p for p in predicted if p.run.sweep == sweep]) for sweep in sweeps]


def _summary(sweep: str, of: list[Predicted]) -> Summary:
    timed = [p for p in of if p.run.measured.seconds is not None]
    judged = [p for p in of if p.run.measured.ran is not None]
    sized = [abs(p.memory_error) for p in of if p.memory_error is not None]
    errors = [p.error for p in timed if p.error is not None]
    ranked = len(timed) >= _FEWEST
    chosen = _chosen(timed) if ranked else None
    fastest = min((p.run.measured.seconds or 0.0 for p in timed), default=0.0)
    return Summary(
        sweep,
        len(of),
        len(timed),
        median(map(abs, errors)) if errors else None,
        median(errors) if errors else None,
        sum(_is_within(p) for p in timed) if timed else None,
        _correlation(timed) if ranked else None,
        chosen.run.name if chosen else "",
        (chosen.run.measured.seconds or 0.0) / fastest - 1 if chosen else None,
        len(judged),
        sum(p.fits == p.run.measured.ran for p in judged),
        median(sized) if sized else None,
    )


def _is_within(predicted: Predicted) -> bool:
    low, high = predicted.candidate.estimate.cost.range
    return low <= (predicted.run.measured.seconds or 0.0) <= high


def _correlation(timed: list[Predicted]) -> float:
    measured = [p.run.measured.seconds for p in timed]
    return float(spearmanr(measured, [p.candidate.seconds for p in timed]).statistic)  # pyright: ignore


def _chosen(timed: list[Predicted]) -> Predicted | None:
    """As a search would, of those that were timed and fit by their prediction."""
    fitting = sorted((p for p in timed if p.fits), key=lambda p: p.candidate.order)
    if not fitting:
        return None
    first = simplest_first([p.candidate for p in fitting], fitting[0].run.cluster.uncertainty)[0]
    return next(p for p in fitting if p.candidate is first)
