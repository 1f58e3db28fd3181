"""Errors of a search: contradicting pins, devices that no layout uses, a model that fits nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count, takewhile
from math import prod
from operator import attrgetter

from passes.errors import PlanError
from planner.cluster.cluster import Cluster
from planner.mesh import MOST_RANKS, SIZES
from planner.search.best_first import BestFirst, Candidate, Found
from planner.search.choice import Cut, Point
from planner.search.losers import gigabytes, why_too_large
from planner.search.space import Space
from planner.spec.fields import AUTO
from planner.spec.spec import Spec

_MOST_TRIED, _MOST_SHOWN = 64, 4


def check_devices(spec: Spec, cluster: Cluster) -> int:
    """How many devices are laid out. Raises PlanError if the cluster has fewer."""
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
    _check_experts(spec, devices)
    if mesh.dp != AUTO and spec.batch.global_size % int(mesh.dp):
        what = f"batch.global = {spec.batch.global_size} is not divisible by mesh.dp = {mesh.dp}"
        raise spec.error("batch.global", what, "change one of them")


def _check_experts(spec: Spec, devices: int) -> None:
    ep = spec.mesh.ep
    if ep != AUTO and devices % int(ep):
        raise spec.error("mesh.ep", f"ep {ep} does not divide the {devices} devices", "choose a divisor, or auto")


def no_layout(spec: Spec, devices: int, space: Space, refused: Sequence[PlanError]) -> PlanError:
    """Not one layout is left: why, and how many devices would have some."""
    if refused and not space.pruned:
        return refused[0] if len(refused) == 1 else _all_refused(spec, devices, refused)
    reasons = [f"{what} ({times} times)" for what, times in space.pruned.most_common(_MOST_SHOWN)]
    reasons += list(dict.fromkeys(error.what for error in refused))[:_MOST_SHOWN]
    near = [n for n in (_nearest(spec, devices, space, -1), _nearest(spec, devices, space, 1)) if n]
    fix = f"use {' or '.join(map(str, near))} devices, " if near else ""
    return spec.error(
        "devices" if spec.devices else "mesh",
        f"no layout uses all {devices} devices: {'; '.join(reasons) or 'no axis can use them'}",
        f"{fix}{'or ' if near else ''}change batch.global or the fixed axes of the mesh",
    )


def _all_refused(spec: Spec, devices: int, refused: Sequence[PlanError]) -> PlanError:
    words = dict.fromkeys(error.what for error in refused)
    what = f"no layout of {devices} devices: {'; '.join(list(words)[:_MOST_SHOWN])}"
    return PlanError(what, where=refused[0].where, fix=refused[0].fix)


def _nearest(spec: Spec, devices: int, space: Space, step: int) -> int | None:
    """The next number of devices with a layout that cuts nothing but blocks and batch."""
    for away in range(1, _MOST_TRIED + 1):
        number = devices + step * away
        if number < 1:
            return None
        tried = Space(spec, number, space.inner_devices, space.facts)
        cut = Cut(1 if spec.mesh.tp == AUTO else int(spec.mesh.tp))
        if next(tried.points(cut, lambda pp, vpp: [1] * pp * vpp), None) is not None:
            return number
    return None


def fits_nowhere(
    order: BestFirst,
    found: Found,
    spec: Spec,
    cluster: Cluster,
    devices: int,
    points_over: Callable[[int], Iterable[Point]],
    estimated: Callable[[Point], Candidate],
) -> PlanError:
    """The error: the layout that needs least, its largest part, and the fewest devices on which a layout fits."""
    memory = cluster.device.memory * cluster.device.usable_memory
    lean = sorted((point for *_, point in order.bounds), key=attrgetter("held"))[:_MOST_TRIED]
    least = min([*found.too_large, *map(order.of, lean)], key=lambda candidate: candidate.fullest.total)
    enough = _enough(devices, cluster.links[0].devices, memory, points_over, estimated)
    if enough:
        fix = f"use {enough[0]} devices of this kind ({enough[1].point})"
    else:
        fix = "use devices with more memory, a smaller model, or fewer fixed axes"
    return spec.error(
        "devices" if spec.devices else "mesh",
        f"the model fits no layout of {devices} devices of {gigabytes(memory)}: the smallest, {least.point}, "
        f"{why_too_large(least, memory)}",
        fix,
    )


def _enough(
    devices: int,
    inner_devices: int,
    memory: float,
    points_over: Callable[[int], Iterable[Point]],
    estimated: Callable[[Point], Candidate],
) -> tuple[int, Candidate] | None:
    """The fewest devices on which a layout fits: of 2, 4, … times as many, then of full nodes below that."""

    def fitting(number: int) -> Candidate | None:
        points = sorted(points_over(number), key=attrgetter("held"))[:_MOST_TRIED]
        tried = (estimated(point) for point in points)
        return next((candidate for candidate in tried if candidate.fullest.total <= memory), None)

    doubled = takewhile(lambda n: n <= min(MOST_RANKS, 1024 * devices), (devices << k for k in count(1)))
    for number in doubled:
        found = fitting(number)
        if found is not None:
            step = max(min(inner_devices, devices), number // _MOST_TRIED)
            fewer = ((n, fitting(n)) for n in range(number // 2 + step, number, step))
            return next(((n, other) for n, other in fewer if other is not None), (number, found))
    return None
