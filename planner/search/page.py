"""The result of a search as one page: candidates by step time and memory, why each loses, and the tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.report.page import scatter as plots
from planner.report.page.bars import Bars, Row, bars_of
from planner.report.page.engine import render
from planner.report.page.scatter import Point, scatter
from planner.report.page.tables import tables_of
from planner.search.best_first import Candidate
from planner.search.losers import PARTS, dominates, gigabytes, percent, seconds_text, why_slower
from planner.search.search import Result
from planner.search.table import result_sections

BEST, FITS, TOO_LARGE = 2, 0, 6  # colours
_KINDS = ((BEST, "among the fastest"), (FITS, "best with another choice"), (TOO_LARGE, "does not fit"))


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate in the list; ``facts``: its details."""

    id: str
    number: str
    layout: str
    kind: str
    fill: int
    facts: tuple[tuple[str, str], ...]
    candidate: Candidate

    @property
    def why(self) -> str:
        return self.facts[0][1]

    @property
    def time(self) -> str:
        return seconds_text(self.candidate.seconds)

    @property
    def memory(self) -> str:
        return gigabytes(self.candidate.fullest.total)


def search_page(result: Result, *, title: str = "") -> str:
    """One HTML page that needs no other file. ``title``: names of the model and the spec."""
    entries = tuple(_entries(result))
    named = {entry.candidate.point for entry in entries}
    cloud = [(c.seconds, float(c.fullest.total)) for c in result.estimated if c.point not in named]
    limit = (float(result.memory_bytes), f"usable: {gigabytes(result.memory_bytes)}")
    points = [
        Point(e.candidate.seconds, float(e.candidate.fullest.total), e.fill, e.number, e.id, e.layout) for e in entries
    ]
    tables = tables_of(result_sections(result))
    return render(
        "search.html.j2",
        title=f"{title + ': ' if title else ''}layouts of {result.devices} devices of {result.cluster.name}",
        facts=_facts(result),
        plot=scatter(points, cloud, limit, seconds_text, gigabytes),
        size=plots,
        legend=[kind for kind in _KINDS if any(e.fill == kind[0] for e in entries)],
        candidates=entries,
        time=_time(entries),
        tables=tables,
        names=[("the fastest", "why not", "ruled out", "spent")[min(i, 3)] for i in range(len(tables))],
    )


def _facts(result: Result) -> list[tuple[str, str]]:
    winner = result.winner
    step, low, high = map(seconds_text, (winner.seconds, *winner.estimate.cost.range))
    return [
        ("the fastest", str(result.winner.point)),
        ("a step", f"{step}, estimated; between {low} and {high}"),
        ("its fullest rank", f"{gigabytes(result.winner.fullest.total)} of {gigabytes(result.memory_bytes)}"),
        ("layouts", f"{result.num_considered:,}, of which {result.num_estimated:,} were estimated"),
    ]


def _entries(result: Result) -> Iterator[Entry]:
    """The fastest, then of each other choice the best layout."""
    for number, candidate in enumerate(result.best, start=1):
        why = why_slower(candidate, result.winner, result.cluster) if number > 1 else "the fastest that fits"
        yield _entry(str(number), candidate, "among the fastest", BEST, why)
    best = {candidate.point for candidate in result.best}
    others = [loser for loser in result.losers if loser.candidate.point not in best]
    for number, loser in enumerate(others, start=len(result.best) + 1):
        fill = FITS if loser.fits else TOO_LARGE
        yield _entry(str(number), loser.candidate, loser.choice, fill, loser.why)


def _entry(number: str, candidate: Candidate, kind: str, fill: int, why: str) -> Entry:
    cost, seconds = candidate.estimate.cost, candidate.seconds or 1.0
    parts = [(words, getattr(cost, part, 0.0)) for part, words in PARTS.items()]
    told = ", ".join(f"{words} {percent(spent / seconds)}" for words, spent in parts if spent >= 0.005 * seconds)
    facts = (
        ("why", why),
        ("layout", str(candidate.point)),
        ("a step", f"{seconds_text(candidate.seconds)}: {told}"),
        ("memory", f"{gigabytes(candidate.fullest.total)}: {dominates(candidate.fullest)}"),
    )
    return Entry(f"candidate-{number}", number, str(candidate.point), kind, fill, facts, candidate)


def _time(entries: tuple[Entry, ...]) -> Bars:
    """A bar for each candidate."""
    rows: list[Row] = []
    for entry in entries:
        cost = entry.candidate.estimate.cost
        spent = [(words, getattr(cost, part, 0.0)) for part, words in PARTS.items()]
        named = [(words, seconds, f"{words} {seconds_text(seconds)}") for words, seconds in spent]
        rows.append((entry.number, named, f"{entry.time}, {entry.kind}"))
    return bars_of("Time by part of the step", rows, list(PARTS.values()))
