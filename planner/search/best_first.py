"""Find the exact best layouts without estimating all: in the order of their lower bounds.

    bound(p) ≤ seconds(p)      so once the next bound is more than the k-th best, no other layout is among the k best

Layouts that do not fit into memory are excluded. Parameters, gradients and the optimizer state do not depend on the
microbatch and the recompute: if they alone do not fit, these variants are not estimated.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

from planner.cost.memory import MemoryRow
from planner.search.choice import Point

Row = tuple[float, Any, Point]  # bound, key, layout


class Estimated(Protocol):
    """The part of planner.cost.estimate.Estimate that the search reads."""

    @property
    def cost(self) -> Any: ...

    @property
    def memory(self) -> Sequence[MemoryRow]: ...


@dataclass(frozen=True)
class Candidate:
    """A layout that was estimated."""

    point: Point
    estimate: Estimated

    @property
    def seconds(self) -> float:
        return self.estimate.cost.step_seconds

    @property
    def memory(self) -> Sequence[MemoryRow]:
        return self.estimate.memory

    @property
    def fullest(self) -> MemoryRow:
        """Of the pp rank that holds the most."""
        return max(self.estimate.memory, key=lambda row: row.total)

    @property
    def order(self) -> tuple[Any, ...]:
        """Fastest first; the simpler one first among equals."""
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

    def __init__(
        self,
        points: Iterable[Point],
        at_least: Callable[[Point], float],
        estimate: Callable[[Point], Estimated],
        fixed: Callable[[Point], Sequence[float]],
        memory_bytes: float,
    ) -> None:
        """``fixed``: bytes that each pp rank holds all the time, the same for all points ``of_weights`` of which are
        equal; never more than an estimate's totals."""
        self.bounds = sorted(((at_least(point), point.key, point) for point in points), key=lambda row: row[:2])
        self._estimate, self._fixed, self.memory_bytes = estimate, fixed, memory_bytes
        self._known: dict[Point, Candidate] = {}
        self._fixed_bytes: dict[Any, tuple[float, ...]] = {}
        self._passing: dict[Any, list[float]] = {}  # of each pp rank: bytes that come and go, whatever ``zero`` is
        self._groups: dict[tuple[str, Any], list[Row]] | None = None

    def search(
        self,
        top: int,
        step: Callable[[int], None] = lambda done: None,
    ) -> Found:
        """The ``top`` fastest that fit."""
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
        """All that were estimated."""
        return list(self._known.values())

    def groups(self) -> dict[tuple[str, Any], list[Row]]:
        """The rows of ``bounds`` that make a choice, by its name and value."""
        if self._groups is None:
            self._groups = {}
            for row in self.bounds:
                for choice in row[2].choices.items():
                    self._groups.setdefault(choice, []).append(row)
        return self._groups

    def of(self, point: Point) -> Candidate:
        """The estimate of a point, made once."""
        known = self._known.get(point)
        if known is None:
            known = self._known[point] = Candidate(point, self._estimate(point))
            passing = [float(r.total - r.parameters - r.gradients - r.optimizer - r.whole) for r in known.memory]
            self._passing.setdefault(_twin(point, 0), passing)
        return known

    def _is_surely_too_large(self, point: Point) -> bool:
        return max(self._fixed_of(point)) > self.memory_bytes

    def _is_known_to_pass(self, point: Point) -> bool:
        """Whether it passes the memory of a device by the figures of the same layout with another ``zero``."""
        passing = self._passing.get(_twin(point, 0), ())
        return any(
            fixed + more > self.memory_bytes for fixed, more in zip(self._fixed_of(point), passing, strict=False)
        )

    def _fixed_of(self, point: Point) -> tuple[float, ...]:
        key = of_weights(point)
        if key not in self._fixed_bytes:
            self._fixed_bytes[key] = tuple(self._fixed(point))
        return self._fixed_bytes[key]


def of_weights(point: Point) -> Any:
    """The choices on which the memory of weights depends."""
    return point.cut, point.layout.mesh, point.layout.sizes, point.layout.zero


def _twin(point: Point, zero: int) -> Any:
    """The same layout with another ``zero``."""
    return point.cut, replace(point.layout, zero=zero)
