"""search(prepared, spec, cluster): every layout that the devices and the spec allow, the fastest first.

cuts      each (tp, sequence parallel, cp, ep, etp) decided once on the captured model
bounds    a lower bound of the step time of every layout
best      estimated in that order, until no other can be among the best
losers    of every other choice of the winner's (another tp, another pp, …) a fast layout, and why it loses
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from math import prod
from operator import attrgetter
from typing import Any

from passes.errors import PlanError
from planner.captured import Prepared
from planner.cluster.cluster import Cluster, Uncertainty
from planner.cost.cut.units import CutWork
from planner.cost.estimate import Estimate
from planner.cost.layout import is_as_fast
from planner.cost.planned import usable_bytes
from planner.mesh import MOST_RANKS, SIZES
from planner.search.best_first import BestFirst, Candidate, Found, Loser, gigabytes, losers, why_too_large
from planner.search.cuts import Cuts
from planner.search.space import KINDS_OF_RECOMPUTE, Cut, Point, Space
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
    seconds: dict[str, float] = field(default_factory=dict)
    estimated: tuple[Candidate, ...] = ()

    @property
    def winner(self) -> Candidate:
        return self.best[0]


def search(
    prepared: Prepared, spec: Spec, cluster: Cluster, top: int = 5, progress: Progress = lambda what, done, all: None
) -> Result:
    """Return the ``top`` fastest layouts. Raises PlanError if there is none, with a fix."""
    devices = check_devices(spec, cluster)
    check_pins(spec, devices)
    return _Search(prepared, spec, cluster, devices, progress).run(top)


def num_behind(best: Sequence[Candidate], uncertainty: Uncertainty) -> int:
    """Return the place of the simplest layout in ``best`` of those that are as fast as the fastest: within what is
    known, and NEAR. Of the first COMPARED, so that the answer does not depend on how many are shown.
    """
    near = [
        (candidate.point.key, place)
        for place, candidate in enumerate(best[:COMPARED])
        if candidate.seconds <= (1 + NEAR) * best[0].seconds
        and is_as_fast(candidate.estimate.cost, best[0].estimate.cost, uncertainty)
    ]
    return min(near, default=((), 0))[1]


_MOST_TRIED, _MOST_SHOWN = 64, 4


def check_devices(spec: Spec, cluster: Cluster) -> int:
    """Return the number of devices to lay out. Raises PlanError if the cluster has fewer."""
    devices = cluster.devices if spec.devices is None else spec.devices
    if devices > cluster.devices:
        raise spec.error(
            "devices",
            f"devices = {devices}, but the cluster {cluster.name} has {cluster.devices}",
            f"set devices to {cluster.devices} or less, or name a larger cluster",
        )
    if devices > MOST_RANKS:
        raise spec.error("devices", f"{devices} devices are more than {MOST_RANKS}", "set devices to fewer")
    return devices


def check_pins(spec: Spec, devices: int) -> None:
    """Raises PlanError if the sizes of the spec do not fit one mesh of so many devices."""
    mesh = spec.mesh
    pinned = {axis: getattr(mesh, axis) for axis in ("tp", "cp", "pp", "dp") if getattr(mesh, axis) != AUTO}
    product, written = prod(pinned.values()), {axis: size for axis, size in pinned.items() if size > 1}
    named = " · ".join(f"{axis} {size}" for axis, size in written.items())
    first = next(iter(written), "tp")
    if devices % product:
        what = f"{named} = {product} does not divide the {devices} devices"
        raise spec.error(
            f"mesh.{first}", what, f"choose sizes with a product that divides {devices}, or leave one to auto"
        )
    if len(pinned) == 4 and product != devices:
        free = [axis for axis in SIZES if getattr(mesh, axis) == AUTO]
        what = f"{named or 'tp, cp, pp and dp of 1'} = {product} leave {devices - product} of {devices} devices idle"
        raise spec.error(f"mesh.{first}", what, f"set devices: {product}, or dp: auto; {', '.join(free)} adds no ranks")
    if mesh.ep != AUTO and devices % int(mesh.ep):
        raise spec.error("mesh.ep", f"ep {mesh.ep} does not divide the {devices} devices", "choose a divisor, or auto")
    if mesh.dp != AUTO and spec.batch.global_size % int(mesh.dp):
        what = f"batch.global = {spec.batch.global_size} is not divisible by mesh.dp = {mesh.dp}"
        raise spec.error("batch.global", what, "change one of them")


def no_layout(spec: Spec, devices: int, space: Space, refused: Sequence[PlanError]) -> PlanError:
    """Return the error that no layout is left: why, and how many devices would have some."""
    if refused and not space.pruned:
        return refused[0] if len(refused) == 1 else _all_refused(devices, refused)
    reasons = [f"{what} ({times} times)" for what, times in space.pruned.most_common(_MOST_SHOWN)]
    reasons += list(dict.fromkeys(error.what for error in refused))[:_MOST_SHOWN]
    near = [n for n in (_nearest(spec, devices, space, -1), _nearest(spec, devices, space, 1)) if n]
    fix = f"use {' or '.join(map(str, near))} devices, " if near else ""
    return spec.error(
        "devices" if spec.devices else "mesh",
        f"no layout uses all {devices} devices: {'; '.join(reasons) or 'no axis can use them'}",
        f"{fix}{'or ' if near else ''}change batch.global or the fixed axes of the mesh",
    )


def _all_refused(devices: int, refused: Sequence[PlanError]) -> PlanError:
    words = dict.fromkeys(error.what for error in refused)
    what = f"no layout of {devices} devices: {'; '.join(list(words)[:_MOST_SHOWN])}"
    return PlanError(what, where=refused[0].where, fix=refused[0].fix)


def _nearest(spec: Spec, devices: int, space: Space, step: int) -> int | None:
    """Return the next number of devices with a layout that cuts nothing but blocks and batch."""
    for away in range(1, _MOST_TRIED + 1):
        number = devices + step * away
        if number < 1:
            return None
        tried = Space(spec, number, space.inner_devices, space.facts)
        cut = Cut(1 if spec.mesh.tp == AUTO else int(spec.mesh.tp))
        if next(tried.points(cut, lambda pp, vpp: [1] * pp * vpp), None) is not None:
            return number
    return None


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
            order = BestFirst(points, self._estimate, usable_bytes(self.cluster))
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
        num_slower = len(order.bounds) - len(order.known) - found.num_fixed - found.num_too_large
        pruned = {
            **self.space.pruned,
            "estimated: memory larger than a device": num_large,
            "not estimated: with another zero its memory is known to be larger than a device": found.num_too_large,
            "not estimated: weights, gradients and optimizer state alone are larger than a device": found.num_fixed,
            "not estimated: the lower bound of its time exceeds the slowest layout shown": num_slower,
        }
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
        """Return layouts of a cut, which is decided if it has any; none if the model does not admit it."""
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
        """Return the error: the smallest layout, its largest part, and the fewest devices on which one fits."""
        lean = sorted((point for *_, point in order.bounds), key=attrgetter("held"))[:_MOST_TRIED]
        least = min([*found.too_large, *map(order.of, lean)], key=lambda candidate: candidate.fullest.total)
        with self._clock("more devices"):
            enough = self._enough(order.memory_bytes)
        fix = "use devices with more memory, a smaller model, or fewer fixed axes"
        return self.spec.error(
            "devices" if self.spec.devices else "mesh",
            f"the model fits no layout of {self.devices} devices of {gigabytes(order.memory_bytes)}: the smallest, "
            f"{least.point}, {why_too_large(least, order.memory_bytes)}",
            f"use {enough[0]} devices of this kind ({enough[1].point})" if enough else fix,
        )

    def _enough(self, memory: float) -> tuple[int, Candidate] | None:
        """Return the fewest devices on which a layout fits: of 2, 4, … times as many, then of full nodes below that."""
        grown = self.cluster.links[-1].model_copy(update={"devices": MOST_RANKS})
        larger = self.cluster.model_copy(update={"links": (*self.cluster.links[:-1], grown)})

        def fitting(number: int) -> Candidate | None:
            points = sorted(self._points_over(number), key=attrgetter("held"))[:_MOST_TRIED]
            tried = (Candidate(point, self._estimate(point, larger)) for point in points)
            return next((candidate for candidate in tried if candidate.fullest.total <= memory), None)

        inner = self.cluster.links[0].devices
        doubled = takewhile(lambda n: n <= min(MOST_RANKS, 1024 * self.devices), (self.devices << k for k in count(1)))
        for number in doubled:
            found = fitting(number)
            if found is not None:
                step = max(min(inner, self.devices), number // _MOST_TRIED)
                fewer = ((n, fitting(n)) for n in range(number // 2 + step, number, step))
                return next(((n, other) for n, other in fewer if other is not None), (number, found))
        return None

    def _points_over(self, devices: int) -> Iterator[Point]:
        space = Space(self.spec, devices, self.cluster.links[0].devices, self.cuts.facts)
        for cut in self.works:
            yield from space.points(cut, partial(self.cuts.stages, cut))

    def _estimate(self, point: Point, cluster: Cluster | None = None) -> Estimate:
        work = self.works[point.cut][point.layout.recompute]
        return Estimate(work, point.layout, cluster or self.cluster, self.spec)

    @contextmanager
    def _clock(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start


def _kinds(spec: Spec) -> tuple[str, ...]:
    given: Any = spec.recompute
    return KINDS_OF_RECOMPUTE if given == AUTO else (str(given),)
