"""search(prepared, spec, cluster): every layout that the devices and the spec allow, the fastest first.

cuts      each (tp, sequence parallel, cp, ep, etp) decided once on the captured model
bounds    a lower bound of the step time of every layout
best      estimated in that order, until no other can be among the best
losers    of every other choice of the winner's (another tp, another pp, …) a fast layout, and why it loses
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from passes.errors import PlanError
from planner.captured import Prepared
from planner.cluster.cluster import Cluster, Uncertainty
from planner.cost.cut.units import CutWork
from planner.cost.estimate import at_least, estimate, rank_holdings
from planner.cost.step_time import is_as_fast
from planner.mesh import MOST_RANKS
from planner.search.best_first import BestFirst, Candidate, Estimated, Found
from planner.search.choice import Cut, Point
from planner.search.cuts import Cuts
from planner.search.losers import Loser, losers
from planner.search.refusals import check_devices, check_pins, fits_nowhere, no_layout
from planner.search.space import BOUNDS, Space
from planner.spec.fields import AUTO
from planner.spec.spec import Spec

COMPARED = 8  # layouts of which the simplest is chosen
NEAR = 0.03  # of a step: a simpler layout may be slower by this, if it is as fast within what is known
Progress = Callable[[str, int, int], None]  # name of the phase, number done, total (0: not known)


@dataclass(frozen=True)
class Result:
    """``best``: the fastest that fit, in order. ``refused``: cuts that the model does not admit, and why. ``pruned``:
    layouts that were not estimated, by reason. ``seconds``: of the search, by phase.
    ``estimated``: all, those that do not fit among them."""

    spec: Spec
    cluster: Cluster
    devices: int
    best: tuple[Candidate, ...]
    losers: tuple[Loser, ...]
    refused: tuple[tuple[Cut, str], ...]
    pruned: dict[str, int]
    num_considered: int
    num_estimated: int
    memory_bytes: float
    bounds: tuple[str, ...] = BOUNDS
    seconds: dict[str, float] = field(default_factory=dict)
    estimated: tuple[Candidate, ...] = ()

    @property
    def winner(self) -> Candidate:
        return self.best[0]


def search(
    prepared: Prepared, spec: Spec, cluster: Cluster, top: int = 5, progress: Progress = lambda what, done, all: None
) -> Result:
    """The ``top`` fastest layouts. Raises PlanError if there is none, with a fix."""
    devices = check_devices(spec, cluster)
    check_pins(spec, devices)
    return _Search(prepared, spec, cluster, devices, progress).run(top)


def num_behind(best: Sequence[Candidate], uncertainty: Uncertainty) -> int:
    """How many of ``best`` the simplest goes before, of those that are as fast as the fastest: within what is known,
    and NEAR.

    Of the first COMPARED, so that the answer does not depend on how many are shown.
    """
    near = [
        (candidate.point.key, place)
        for place, candidate in enumerate(best[:COMPARED])
        if candidate.seconds <= (1 + NEAR) * best[0].seconds
        and is_as_fast(candidate.estimate.cost, best[0].estimate.cost, uncertainty)
    ]
    return min(near, default=((), 0))[1]


class _Search:
    """Owns one search: the work of each cut, the layouts with their bounds, and the clock."""

    def __init__(self, prepared: Prepared, spec: Spec, cluster: Cluster, devices: int, progress: Progress) -> None:
        self.spec, self.cluster, self.devices, self.progress = spec, cluster, devices, progress
        self.seconds: dict[str, float] = {}
        self.works: dict[Cut, dict[str, CutWork]] = {}
        self.refused: dict[Cut, PlanError] = {}
        with self._clock("blocks"):
            kinds = _kinds(spec)
            self.cuts = Cuts(prepared, spec, kinds, cluster)
            inner = cluster.links[0].devices
            self.space = Space(spec, devices, inner, self.cuts.facts)

    def run(self, top: int) -> Result:
        points = self._points()
        with self._clock("bounds"):
            order = BestFirst(points, self._at_least, self._estimate, self._fixed, memory_of(self.cluster))
        with self._clock("estimates"):
            found = order.search(max(top, COMPARED), step=lambda done: self.progress("estimating layouts", done, 0))
            behind = num_behind(found.best, self.cluster.uncertainty)
            if len(found.best) < top + behind:
                found = order.search(top + behind)
            found.best = found.best[behind:][:top]  # in order of their seconds, the chosen one first
        if not found.best:
            raise self._fits_nowhere(order, found)
        with self._clock("reasons"):
            lost = losers(order, found.best[0], self.cluster)
        num_large = sum(c.fullest.total > order.memory_bytes for c in order.known)
        pruned = dict(self.space.pruned)
        if num_large or found.num_fixed:
            pruned["estimated: memory larger than a device"] = num_large
            pruned["not estimated: with another zero its memory is known to be larger than a device"] = (
                found.num_too_large
            )
            pruned["not estimated: weights, gradients and optimizer state alone are larger than a device"] = (
                found.num_fixed
            )
        num_slower = len(order.bounds) - len(order.known) - found.num_fixed - found.num_too_large
        pruned["not estimated: the lower bound of its time exceeds the slowest layout shown"] = num_slower
        return Result(
            self.spec, self.cluster, self.devices, tuple(found.best), lost,
            tuple((cut, error.what) for cut, error in self.refused.items()),
            {reason: count for reason, count in pruned.items() if count},
            len(points) + sum(self.space.pruned.values()), len(order.known), order.memory_bytes, seconds=self.seconds,
            estimated=tuple(order.known),
        )  # fmt: skip

    def _points(self) -> list[Point]:
        points: list[Point] = []
        with self._clock("cuts"):
            cuts = list(self.space.cuts())
            for done, cut in enumerate(cuts):
                self.progress(f"sharding the model over {cut}", done, len(cuts))
                points += self._of_cut(cut)
        if not points:
            raise no_layout(self.spec, self.devices, self.space, list(self.refused.values()))
        return points

    def _of_cut(self, cut: Cut) -> list[Point]:
        """The layouts of a cut; none if the model does not admit it. The cut is decided only if it has layouts."""
        plain = self.refused.get(Cut(cut.tp, etp=cut.tp))
        if plain is not None and not cut.has_expert_axes:  # sequence parallelism does not change which sizes tp divides
            self.refused[cut] = plain
            return []
        try:
            points = list(self.space.points(cut, partial(self.cuts.stages, cut)))
            if points:
                self.works[cut] = self.cuts.works(cut)
            return points
        except PlanError as error:
            self.refused[cut] = error
            return []

    def _fits_nowhere(self, order: BestFirst, found: Found) -> PlanError:
        grown = self.cluster.links[-1].model_copy(update={"devices": MOST_RANKS})
        larger = self.cluster.model_copy(update={"links": (*self.cluster.links[:-1], grown)})

        def estimated(point: Point) -> Candidate:
            work = self.works[point.cut][point.layout.recompute]
            return Candidate(point, estimate(work, point.layout, larger, self.spec))

        with self._clock("more devices"):
            return fits_nowhere(order, found, self.spec, self.cluster, self.devices, self._points_over, estimated)

    def _points_over(self, devices: int) -> Iterator[Point]:
        """Layouts of more devices, over those cuts that were decided."""
        space = Space(self.spec, devices, self.cluster.links[0].devices, self.cuts.facts)
        for cut in self.works:
            yield from space.points(cut, partial(self.cuts.stages, cut))

    def _at_least(self, point: Point) -> float:
        return at_least(self.works[point.cut][point.layout.recompute], point.layout, self.cluster, self.spec)

    def _estimate(self, point: Point) -> Estimated:
        return estimate(self.works[point.cut][point.layout.recompute], point.layout, self.cluster, self.spec)

    def _fixed(self, point: Point) -> Sequence[float]:
        """Bytes of weights, gradients and optimizer on each pp rank."""
        holds = rank_holdings(self.works[point.cut][point.layout.recompute], point.layout, self.spec)
        return [float(held.parameters + held.gradients + held.optimizer) for held in holds]

    @contextmanager
    def _clock(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start


def memory_of(cluster: Cluster) -> float:
    """Bytes that a process may fill."""
    return cluster.device.memory * cluster.device.usable_memory


def _kinds(spec: Spec) -> tuple[str, ...]:
    given: Any = spec.recompute
    return ("none", "selective", "full") if given == AUTO else (str(given),)
