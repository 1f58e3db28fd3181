"""Why other layouts lose: a fast layout for every choice other than the winner's, and its cost in words.

tp 8      14 % slower (1.31 s against 1.15 s): tp_comm 310 ms against 90 ms, over InfiniBand at 40 GB/s
pp 1      needs 91.2 GB of 78.1 on pp rank 0: optimizer 54.0 GB, activations 20.3 GB
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from planner.cluster.cluster import Cluster
from planner.cluster.links import group, wires
from planner.cost.memory import MemoryRow
from planner.cost.step_time import is_as_fast
from planner.mesh import Mesh
from planner.search.best_first import BestFirst, Candidate

MOST_TRIED = 16  # layouts for one choice that may not fit, before one that holds little is taken
MOST_NAMED = 3
PARTS = {
    "compute": "compute",
    "recompute": "recompute",
    "tp_comm": "tp collectives",
    "cp_comm": "cp collectives",
    "ep_comm": "ep collectives",
    "pp_comm": "messages between stages",
    "pp_bubble": "bubble",
    "dp_comm": "dp collectives",
    "optimizer": "update",
}
AXES = {"tp_comm": "tp", "cp_comm": "cp", "ep_comm": "ep", "dp_comm": "dp"}
HELD = ("parameters", "gradients", "optimizer", "activations", "logits", "working", "communication")
HELD += ("whole", "graph_buffers", "device")


@dataclass(frozen=True)
class Loser:
    """A layout with ``choice``, such as ``tp 8``: one of its fastest, or, where none ``fits``, the smallest."""

    choice: str
    candidate: Candidate
    fits: bool
    why: str


def losers(order: BestFirst, winner: Candidate, cluster: Cluster) -> tuple[Loser, ...]:
    """One for each value of each axis that the winner does not have, those nearest to it in speed first.

    An exact answer for each would take several times as long as the search itself.
    """
    result, known = list[Loser](), list(filter(order.fits, order.known))
    own = winner.point.choices
    for (name, value), rows in order.groups().items():
        if name == "dp" or own.get(name) == value:
            continue
        of_choice = [candidate for candidate in known if candidate.point.choices.get(name) == value]
        one = min(of_choice, key=lambda c: c.order, default=None) or order.one_of(rows, MOST_TRIED)
        fits = order.fits(one)
        why = why_slower(one, winner, cluster) if fits else why_too_large(one, order.memory_bytes)
        result.append(Loser(f"{name} {_word(value)}", one, fits, why))
    return tuple(_joined(sorted(result, key=_nearest)))


def _nearest(loser: Loser) -> tuple[Any, ...]:
    """Those that fit first, fastest first; then the smallest first."""
    return not loser.fits, loser.candidate.order if loser.fits else (loser.candidate.fullest.total,)


def _joined(rows: list[Loser]) -> Iterator[Loser]:
    """Choices with the same best layout are one row: ``pp 2, vpp 2``."""
    for _, same in groupby(rows, key=lambda loser: loser.candidate.point):
        together = list(same)
        yield replace(together[0], choice=", ".join(loser.choice for loser in together))


def _word(value: Any) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def why_slower(candidate: Candidate, winner: Candidate, cluster: Cluster) -> str:
    """By how much, and the parts of the step that make it so, largest first."""
    more = candidate.seconds / winner.seconds - 1
    if abs(more) < 5e-4:
        return "equally fast; it sends more messages, or shards more"
    parts = sorted(_differences(candidate, winner), reverse=True)
    largest = parts[0][0] if parts else 0.0
    named = [words for difference, words in _worded(parts, candidate, winner, cluster) if difference > 0.15 * largest]
    said = f"{percent(abs(more))} {'slower' if more > 0 else 'faster'}: {', '.join(named[:MOST_NAMED])}"
    if is_as_fast(candidate.estimate.cost, winner.estimate.cost, cluster.uncertainty):
        return f"as fast, within what is known ({said})"
    return said


def _differences(candidate: Candidate, winner: Candidate) -> Iterator[tuple[float, str]]:
    for part in PARTS:
        difference = getattr(candidate.estimate.cost, part, 0.0) - getattr(winner.estimate.cost, part, 0.0)
        if difference > 0:
            yield difference, part


def _worded(
    parts: list[tuple[float, str]], candidate: Candidate, winner: Candidate, cluster: Cluster
) -> Iterator[tuple[float, str]]:
    for difference, part in parts:
        here, there = (getattr(c.estimate.cost, part) for c in (candidate, winner))
        if part == "pp_bubble":
            shares = [percent(c.estimate.cost.pp_bubble / c.seconds) for c in (candidate, winner)]
            seconds = [seconds_text(here), seconds_text(there)]
            yield difference, "bubble {} against {}".format(*(seconds if shares[0] == shares[1] else shares))
            continue
        words = f"{PARTS[part]} {seconds_text(here)} against {seconds_text(there)}"
        if part in AXES:
            words += _over(candidate.point.layout.mesh, AXES[part], cluster)
        if part == "compute":
            words += f" ({percent(here / there - 1)} more per rank)" if there else ""
        yield difference, words


def _over(mesh: Mesh, axis: str, cluster: Cluster) -> str:
    """The slowest link that a group of ``axis`` uses."""
    token = mesh.data_axis if axis == "dp" else axis
    levels = [level for level, size in enumerate(group(mesh, token, cluster).sizes) if size > 1]
    if not levels:
        return ""
    link, wire = cluster.links[levels[-1]], wires(cluster)[levels[-1]]
    return f" over {link.name} at {wire.bandwidth / 1e9:.3g} GB/s"


def why_too_large(candidate: Candidate, memory_bytes: float) -> str:
    """The memory that its fullest rank needs, the memory of a device, and the largest part."""
    row = candidate.fullest
    return f"needs {gigabytes(row.total)} of {gigabytes(memory_bytes)} on pp rank {row.pp_rank}: {dominates(row)}"


def dominates(row: MemoryRow) -> str:
    """The largest categories."""
    parts = sorted(((getattr(row, part), part) for part in HELD), reverse=True)
    return ", ".join(f"{part.replace('_', ' ')} {gigabytes(size)}" for size, part in parts[:2] if size)


def gigabytes(size: float) -> str:
    """``73.6 GB``; small ones in MB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def seconds_text(seconds: float) -> str:
    """``1.31 s`` or ``310 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def percent(share: float) -> str:
    """``4 %``; below ten with one digit."""
    return f"{share * 100:.0f} %" if abs(share) >= 0.1 else f"{share * 100:.1f} %"
