"""Find the exact best layouts without estimating all: in the order of their lower bounds.

    bound(p) ≤ seconds(p)      so once the next bound is more than the k-th best, no other layout is among the k best

Layouts that do not fit into memory are excluded. Parameters, gradients and the optimizer state do not depend on the
microbatch and the recompute: if they alone do not fit, these variants are not estimated.

Why other layouts lose: a fast layout for every choice other than the winner's, and its cost in words.

tp 8      14 % slower (1.31 s against 1.15 s): tp_comm 310 ms against 90 ms, over InfiniBand at 40 GB/s
pp 1      needs 91.2 GB of 78.1 on pp rank 0: optimizer 54.0 GB, activations 20.3 GB
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from typing import Any

from planner.cluster.cluster import Cluster
from planner.cluster.links import outermost, wires
from planner.cost.estimate import Estimate
from planner.cost.layout import PARTS, is_as_fast
from planner.cost.memory import PARTS as MEMORY_PARTS
from planner.cost.memory import MemoryRow
from planner.mesh import Mesh
from planner.search.space import Point

Row = tuple[float, Any, Point]  # bound, key, layout


@dataclass(frozen=True)
class Candidate:
    """A layout that was estimated."""

    point: Point
    estimate: Estimate

    @property
    def seconds(self) -> float:
        return self.estimate.cost.step_seconds

    @property
    def memory(self) -> Sequence[MemoryRow]:
        return self.estimate.memory

    @property
    def fullest(self) -> MemoryRow:
        return max(self.estimate.memory, key=lambda row: row.total)

    @property
    def order(self) -> tuple[Any, ...]:
        """Return a key that orders the fastest first; the simpler one first among equals."""
        return self.seconds, self.point.key


@dataclass
class Found:
    """``best`` in order; ``too_large``: estimated, and does not fit; ``num_fixed``: layouts that were not estimated,
    since their lasting memory alone does not fit.
    """

    best: list[Candidate] = field(default_factory=list)
    too_large: list[Candidate] = field(default_factory=list)
    num_fixed: int = 0
    num_estimated: int = 0
    num_too_large: int = 0  # known without an estimate


class BestFirst:
    """Owns the bounds of all points, and each estimate once made."""

    def __init__(self, points: Iterable[Point], estimate: Callable[[Point], Estimate], memory_bytes: float) -> None:
        bounds = ((estimate(point).at_least, point.key, point) for point in points)
        self.bounds = sorted(bounds, key=lambda row: row[:2])
        self._estimate, self.memory_bytes = estimate, memory_bytes
        self._known: dict[Point, Candidate] = {}
        self._fixed_bytes: dict[Any, tuple[float, ...]] = {}
        self._passing: dict[Any, list[float]] = {}  # of each pp rank: bytes that come and go, whatever ``zero`` is
        self._groups: dict[tuple[str, Any], list[Row]] | None = None

    def search(self, top: int, step: Callable[[int], None] = lambda done: None) -> Found:
        found, ranked = Found(), list[tuple[tuple[Any, ...], int]]()
        candidates: list[Candidate] = []
        fitting: set[Any] = set()  # more shards of a layout that fits are no faster
        for bound, _, point in self.bounds:
            if len(ranked) >= top and bound > ranked[top - 1][0][0]:
                break
            if _twin(point, point.layout.zero - 1) in fitting:
                fitting.add(_twin(point, point.layout.zero))
                continue
            if self._is_surely_too_large(point):
                found.num_fixed += 1
                continue
            if self._is_known_to_pass(point):
                found.num_too_large += 1
                continue
            candidate = self.of(point)
            found.num_estimated += 1
            step(found.num_estimated)
            if not self.fits(candidate):
                found.too_large.append(candidate)
                continue
            candidates.append(candidate)
            fitting.add(_twin(point, point.layout.zero))
            insort(ranked, (candidate.order, len(candidates) - 1))
        found.best = [candidates[index] for _, index in ranked[:top]]
        return found

    def fits(self, candidate: Candidate) -> bool:
        return candidate.fullest.total <= self.memory_bytes

    def one_of(self, rows: Sequence[Row], most: int) -> Candidate:
        """A fast layout of ``rows`` by few estimates: the first by its bound that fits, of ``most`` and of ``most``
        that hold little; else the one that holds least, which may not fit."""
        least = self.of(min((point for *_, point in rows), key=lambda point: point.held))
        if not self.fits(least):
            return least
        lean = [row for row in rows if row[2].held[1:3] == least.point.held[1:3]]
        tried = (self._first_that_fits(some, most) for some in (rows, lean))
        return next((found for found in tried if found is not None), least)

    def _first_that_fits(self, rows: Sequence[Row], most: int) -> Candidate | None:
        left = (point for *_, point in rows if not self._is_surely_too_large(point))
        tried = islice((self.of(point) for point in left if not self._is_known_to_pass(point)), most)
        return next(filter(self.fits, tried), None)

    @property
    def known(self) -> list[Candidate]:
        return list(self._known.values())

    def groups(self) -> dict[tuple[str, Any], list[Row]]:
        """Return the rows of ``bounds`` that make a choice, by its name and value."""
        if self._groups is None:
            self._groups = {}
            for row in self.bounds:
                for choice in row[2].choices.items():
                    self._groups.setdefault(choice, []).append(row)
        return self._groups

    def of(self, point: Point) -> Candidate:
        known = self._known.get(point)
        if known is None:
            known = self._known[point] = Candidate(point, self._estimate(point))
            passing = [float(r.total - r.parameters - r.gradients - r.optimizer - r.whole) for r in known.memory]
            self._passing.setdefault(_twin(point, 0), passing)
        return known

    def _is_surely_too_large(self, point: Point) -> bool:
        return max(self._fixed_of(point)) > self.memory_bytes

    def _is_known_to_pass(self, point: Point) -> bool:
        """Return whether the same layout with another ``zero`` shows that it needs more memory than there is."""
        passing = self._passing.get(_twin(point, 0), ())
        return any(
            fixed + more > self.memory_bytes for fixed, more in zip(self._fixed_of(point), passing, strict=False)
        )

    def _fixed_of(self, point: Point) -> tuple[float, ...]:
        """Return bytes of weights, gradients and optimizer on each pp rank."""
        key = of_weights(point)
        if key not in self._fixed_bytes:
            self._fixed_bytes[key] = tuple(float(sum(held.lasting[:3])) for held in self._estimate(point).holds)
        return self._fixed_bytes[key]


def of_weights(point: Point) -> Any:
    return point.cut, point.layout.mesh, point.layout.sizes, point.layout.zero


def _twin(point: Point, zero: int) -> Any:
    """Return the same layout with another ``zero``."""
    return point.cut, replace(point.layout, zero=zero)


MOST_TRIED = 16  # layouts for one choice that may not fit, before one that holds little is taken
MOST_NAMED = 3
_WORDS = {"True": "on", "False": "off"}
AXES = {"tp_comm": "tp", "cp_comm": "cp", "ep_comm": "ep", "dp_comm": "dp"}


@dataclass(frozen=True)
class Loser:
    """A layout with ``choice``, such as ``tp 8``: one of its fastest, or, where none ``fits``, the smallest."""

    choice: str
    candidate: Candidate
    fits: bool
    why: str


def losers(order: BestFirst, winner: Candidate, cluster: Cluster) -> tuple[Loser, ...]:
    """Return a layout for each value of each axis that the winner does not have, the nearest in speed first.

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
        result.append(Loser(f"{name} {_WORDS.get(str(value), value)}", one, fits, why))
    return tuple(_joined(sorted(result, key=_nearest)))


def _nearest(loser: Loser) -> tuple[Any, ...]:
    """Return a key that orders layouts that fit first, fastest first; then the smallest first."""
    return not loser.fits, loser.candidate.order if loser.fits else (loser.candidate.fullest.total,)


def _joined(rows: list[Loser]) -> Iterator[Loser]:
    """Join choices with the same best layout in one row: ``pp 2, vpp 2``."""
    for _, same in groupby(rows, key=lambda loser: loser.candidate.point):
        together = list(same)
        yield replace(together[0], choice=", ".join(loser.choice for loser in together))


def why_slower(candidate: Candidate, winner: Candidate, cluster: Cluster) -> str:
    """Return the difference in speed, and the parts of the step that cause it, largest first."""
    more = candidate.seconds / winner.seconds - 1
    if abs(more) < 5e-4:
        return "equally fast; it sends more messages, or shards more"
    costs = candidate.estimate.cost, winner.estimate.cost
    differences = ((getattr(costs[0], part) - getattr(costs[1], part), part) for part in PARTS)
    parts = sorted((pair for pair in differences if pair[0] > 0), reverse=True)
    largest = parts[0][0] if parts else 0.0
    named = [_words(part, candidate, winner, cluster) for difference, part in parts if difference > 0.15 * largest]
    said = f"{percent(abs(more))} {'slower' if more > 0 else 'faster'}: {', '.join(named[:MOST_NAMED])}"
    if is_as_fast(candidate.estimate.cost, winner.estimate.cost, cluster.uncertainty):
        return f"as fast, within what is known ({said})"
    return said


def _words(part: str, candidate: Candidate, winner: Candidate, cluster: Cluster) -> str:
    here, there = (getattr(c.estimate.cost, part) for c in (candidate, winner))
    if part == "pp_bubble":
        shares = percent(here / candidate.seconds), percent(there / winner.seconds)
        if shares[0] != shares[1]:
            return "bubble {} against {}".format(*shares)
    words = f"{PARTS[part]} {seconds_text(here)} against {seconds_text(there)}"
    if part in AXES:
        words += _over(candidate.point.layout.mesh, AXES[part], cluster)
    return words + (f" ({percent(here / there - 1)} more per rank)" if part == "compute" and there else "")


def _over(mesh: Mesh, axis: str, cluster: Cluster) -> str:
    """Return the slowest link that a group of ``axis`` uses."""
    level = outermost(mesh, mesh.data_axis if axis == "dp" else axis, cluster)
    if level is None:
        return ""
    link, wire = cluster.links[level], wires(cluster)[level]
    return f" over {link.name} at {wire.bandwidth / 1e9:.3g} GB/s"


def why_too_large(candidate: Candidate, memory_bytes: float) -> str:
    """Return the memory that its fullest rank needs, the memory of a device, and the largest part."""
    row = candidate.fullest
    return f"needs {gigabytes(row.total)} of {gigabytes(memory_bytes)} on pp rank {row.pp_rank}: {dominates(row)}"


def dominates(row: MemoryRow) -> str:
    parts = sorted(((getattr(row, part), part) for part in MEMORY_PARTS if part != "slack"), reverse=True)
    return ", ".join(f"{part.replace('_', ' ')} {gigabytes(size)}" for size, part in parts[:2] if size)


def gigabytes(size: float) -> str:
    """Return text such as ``73.6 GB``; small sizes in MB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def seconds_text(seconds: float) -> str:
    """Return text such as ``1.31 s`` or ``310 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def percent(share: float) -> str:
    """Return text such as ``4 %``; below ten with one digit."""
    return f"{share * 100:.0f} %" if abs(share) >= 0.1 else f"{share * 100:.1f} %"
