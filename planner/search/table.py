"""Print the result of a search, as text or JSON: the best layouts, why others lose, and the ruled-out layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.report.section import Section
from planner.search.best_first import Candidate
from planner.search.losers import PARTS, gigabytes, percent, seconds_text, why_slower
from planner.search.search import Result

_SHARES = {
    "compute": ("compute", "recompute"),
    "tp": ("tp_comm",),
    "cp, ep": ("cp_comm", "ep_comm"),
    "pp": ("pp_comm",),
    "bubble": ("pp_bubble",),
    "dp, update": ("dp_comm", "optimizer"),
}


def result_sections(result: Result) -> list[Section]:
    """In the order in which they are printed."""
    return [_best(result), *_losers(result), *_ruled_out(result), _spent(result)]


def _best(result: Result) -> Section:
    tokens = _tokens(result)
    columns = ("", "layout", "a step", "between", "tokens/s" if tokens else "sequences/s", "memory", *_SHARES)
    rows = []
    for number, candidate in enumerate(result.best, start=1):
        rate = (tokens or result.spec.batch.global_size) / candidate.seconds if candidate.seconds else 0.0
        rows.append(
            (str(number), str(candidate.point), seconds_text(candidate.seconds), _between(candidate), f"{rate:,.0f}",
             gigabytes(candidate.fullest.total), *_shares(candidate))
        )  # fmt: skip
    title = f"The fastest layouts of {result.devices} devices of {result.cluster.name}"
    note = (
        f"estimated; memory of the fullest rank, out of {gigabytes(result.memory_bytes)}; shares of a step; "
        f"batches of {result.spec.batch.global_size} sequences"
    )
    right = frozenset(("a step", "between", "tokens/s", "sequences/s", "memory", *_SHARES))
    return Section(title, columns, tuple(rows), note=note, right=right)


def _between(candidate: Candidate) -> str:
    return " and ".join(map(seconds_text, candidate.estimate.cost.range))


def _shares(candidate: Candidate) -> list[str]:
    cost = candidate.estimate.cost
    whole = candidate.seconds or 1.0
    return [percent(sum(getattr(cost, part) for part in parts) / whole) for parts in _SHARES.values()]


def _losers(result: Result) -> list[Section]:
    of_point = {loser.candidate.point: loser.choice for loser in result.losers}
    best = {other.point for other in result.best}
    rows = [
        (": ".join(filter(None, (str(number), of_point.get(other.point)))), str(other.point),
         why_slower(other, result.winner, result.cluster))
        for number, other in enumerate(result.best[1:], start=2)
    ]  # fmt: skip
    rows += [(r.choice, str(r.candidate.point), r.why) for r in result.losers if r.candidate.point not in best]
    title = "Why other layouts lose: the rest of the fastest, and a fast layout for each other choice"
    return [Section(title, ("choice", "layout", "reason"), tuple(rows))] if rows else []


def _ruled_out(result: Result) -> list[Section]:
    refused: dict[str, list[str]] = {}
    for cut, what in result.refused:
        refused.setdefault(what, []).append(str(cut))
    rows = [(cuts[0] if len(cuts) == 1 else f"{len(cuts)} cuts", what) for what, cuts in refused.items()]
    rows += [(f"{count:,}", reason) for reason, count in result.pruned.items()]
    rows += [("not searched", bound) for bound in result.bounds]
    title = f"Ruled out of {result.num_considered:,} layouts; {result.num_estimated:,} were estimated"
    return [Section(title, ("layouts", "reason"), tuple(rows))]


def _spent(result: Result) -> Section:
    total = sum(result.seconds.values())
    parts = ", ".join(f"{what} {spent:.2f} s" for what, spent in result.seconds.items() if spent >= 0.005)
    return Section(f"Searched in {total:.2f} s", (), (), note=parts)


def _tokens(result: Result) -> int:
    """Tokens of a step: of the longest sequence of ids; 0 without ids."""
    lengths = [i.sizes[0] for i in result.spec.inputs.values() if len(i.shape) == 1 and i.dtype.startswith("int")]
    return result.spec.batch.global_size * max(lengths, default=0)


def result_to_dict(result: Result) -> dict[str, Any]:
    """The form of ``--format json``; docs/search.md describes it."""
    return {
        "devices": result.devices,
        "cluster": result.cluster.name,
        "memory_bytes": int(result.memory_bytes),
        "considered": result.num_considered,
        "estimated": result.num_estimated,
        "best": [_candidate(candidate) for candidate in result.best],
        "losers": [
            {"choice": loser.choice, "fits": loser.fits, "why": loser.why, **_candidate(loser.candidate)}
            for loser in result.losers
        ],
        "refused": [{"cut": str(cut), "why": what} for cut, what in result.refused],
        "pruned": result.pruned,
        "bounds": list(result.bounds),
        "seconds": result.seconds,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    cost, layout = candidate.estimate.cost, candidate.point.layout
    choices: Mapping[str, Any] = {**candidate.point.choices, "etp": layout.mesh.etp}
    return {
        "layout": {**{name.replace(" ", "_"): value for name, value in choices.items()}, "stages": list(layout.sizes)},
        "step_seconds": candidate.seconds,
        "step_seconds_range": list(cost.range),
        "memory_bytes": candidate.fullest.total,
        "cost": {part: getattr(cost, part) for part in PARTS},
    }
