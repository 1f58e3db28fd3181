"""Seconds of the units of a cut, forward and backward of one microbatch, by cause.

A collective that overlaps products costs the exposed rest: seconds − overlap · min(seconds, those products). If weight
gradients wait for a W of the schedule, nothing overlaps the collectives of a backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

from planner.cluster.cluster import Cluster
from planner.cluster.links import group, seconds, wires
from planner.cost.cut.kernels import Op, Size
from planner.cost.cut.units import CutWork, Message, Phase, UnitWork
from planner.cost.seconds.roofline import Roofline
from planner.mesh import BY_ROUTING, Mesh
from planner.pipeline.zero_bubble import StageCosts


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by cause; ``host``: of the host that launches the kernels meanwhile."""

    compute: float = 0.0
    recompute: float = 0.0
    tp_comm: float = 0.0
    cp_comm: float = 0.0
    ep_comm: float = 0.0
    dp_comm: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.recompute + self.tp_comm + self.cp_comm + self.ep_comm + self.dp_comm

    def plus(self, other: Spent, times: int = 1) -> Spent:
        return Spent(*(getattr(self, f.name) + times * getattr(other, f.name) for f in fields(Spent)))

    def with_host(self) -> Spent:
        """The device waits for its host, if that takes longer over all kernels."""
        waits = max(0.0, self.host - self.compute - self.recompute)
        return replace(self, compute=self.compute + waits, host=0.0)


CAUSES = {"tp": "tp_comm", "cp": "cp_comm", **dict.fromkeys(BY_ROUTING, "ep_comm")}


class Pricing:
    """The seconds of kernels and collectives, for a mesh on a cluster. Owns: the links of each axis."""

    def __init__(self, mesh: Mesh, cluster: Cluster, slower: float = 1.0) -> None:
        self.mesh, self.cluster = mesh, cluster
        self.roofline, self.wires = Roofline(cluster.device, slower), wires(cluster, slower)

    def message(self, message: Message, micro: int, *, alone: bool = False) -> float:
        """Seconds that the rank waits for it. ``alone``: no product overlaps it."""
        whole = self.collective(message.kind, message.axis, message.bytes.at(micro))
        if alone:
            return whole
        beside = sum(self.roofline.seconds(op, micro) for op in message.beside)
        return whole - self.cluster.overlap * min(whole, beside)

    def collective(self, kind: str, axis: str, num_bytes: float) -> float:
        return seconds(kind, num_bytes, group(self.mesh, axis, self.cluster), self.wires)

    def phase(self, phase: Phase, micro: int, *, again: bool = False, alone: bool = False) -> Spent:
        spent = dict.fromkeys((f.name for f in fields(Spent)), 0.0)
        spent["recompute" if again else "compute"] = self.roofline.all(phase.ops, micro)
        spent["host"] = self.roofline.host(phase.ops, phase.saved)
        for message, count in phase.messages:
            cause = "recompute" if again else CAUSES.get(message.axis, "dp_comm")
            spent[cause] += count * self.message(message, micro, alone=alone)
        return Spent(**spent)


NO_SECONDS = Spent()


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """Of one unit, or stage, and one microbatch. ``weights``: of a W, if the schedule has them; else none, and the
    backward has all.
    """

    forward: Spent = NO_SECONDS
    backward: Spent = NO_SECONDS
    weights: Spent = NO_SECONDS

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total + self.weights.total

    def plus(self, other: UnitSeconds) -> UnitSeconds:
        weights = self.weights.plus(other.weights)
        return UnitSeconds(self.forward.plus(other.forward), self.backward.plus(other.backward), weights)

    def with_host(self) -> UnitSeconds:
        """Each pass as long as the host needs for it, or longer."""
        return UnitSeconds(self.forward.with_host(), self.backward.with_host(), self.weights.with_host())


def unit_seconds(unit: UnitWork, kind: str, pricing: Pricing, micro: int, *, waits: bool = False) -> UnitSeconds:
    """Forward; backward with its recomputation; weight gradients, if they are deferred."""
    work = unit.kinds[kind]
    found = _sides(unit.forward, work.backward, work.weights, pricing, micro, waits=waits)
    return replace(found, backward=found.backward.plus(pricing.phase(work.again, micro, again=True)))


def _sides(
    forward: Phase, backward: Phase, weights: Phase, pricing: Pricing, micro: int, *, waits: bool
) -> UnitSeconds:
    if not waits:
        return UnitSeconds(pricing.phase(forward, micro), pricing.phase(backward, micro))
    later = dict(weights.ops)
    rest = replace(backward, ops=tuple((op, count - later.get(op, 0)) for op, count in backward.ops))
    parts = pricing.phase(forward, micro), pricing.phase(rest, micro, alone=True), pricing.phase(weights, micro)
    return UnitSeconds(*parts)


class WorkSeconds:
    """Seconds of all units of a cut under one kind of recompute, and their sums over ranges.

    ``until``: all seconds of the units before each, and of all, without waits for the host; ``forward_until``: of their
    forwards alone. ``waits``: whether gradients of weights are actions of their own.
    """

    def __init__(self, work: CutWork, kind: str, pricing: Pricing, *, waits: bool = False) -> None:
        found: dict[int, UnitSeconds] = {}
        for unit in work.units:
            if id(unit) not in found:
                found[id(unit)] = unit_seconds(unit, kind, pricing, work.micro, waits=waits)
        self.units = [found[id(unit)] for unit in work.units]
        self.flops, self.dtype = flops_of(work, kind)
        self.shared = [
            (s, _sides(s.forward, s.backward, s.weights, pricing, work.micro, waits=waits)) for s in work.shared
        ]
        self.until = [0.0, *accumulate(unit.total for unit in self.units)]
        self.forward_until = [0.0, *accumulate(unit.forward.total for unit in self.units)]

    def stage(self, first: int, end: int) -> UnitSeconds:
        """Of a stage of units [first, end)."""
        total = UnitSeconds()
        for unit in self.units[first:end]:
            total = total.plus(unit)
        for shared, spent in self.shared:
            if shared.is_in(first, end):
                total = total.plus(spent)
        return total.with_host()


def flops_of_stages(work: CutWork, kind: str, ranges: Sequence[tuple[int, int]]) -> StageCosts:
    """Operations of products of one microbatch on each stage: forward, backward without those of weights, and these.

    Attention has no weights: its backward is a B alone.
    """

    def of_ops(*phases: Phase) -> float:
        return sum(op.flops(work.micro) * count for phase in phases for op, count in phase.ops if _multiplies(op))

    def of_stage(first: int, end: int) -> tuple[float, float, float]:
        units, shared = work.units[first:end], [s for s in work.shared if s.is_in(first, end)]
        kinds = [unit.kinds[kind] for unit in units]
        forward = of_ops(*(u.forward for u in units), *(s.forward for s in shared))
        weights = of_ops(*(k.weights for k in kinds), *(s.weights for s in shared))
        whole = of_ops(*(k.backward for k in kinds), *(k.again for k in kinds), *(s.backward for s in shared))
        return forward, whole - weights, weights

    return StageCosts(*(list(side) for side in zip(*(of_stage(*of) for of in ranges), strict=True)))


def _multiplies(op: Op) -> bool:
    return op.sides is not None or op.attention != Size()


def flops_of(work: CutWork, kind: str) -> tuple[float, str]:
    """Operations of products of all units for one microbatch, forward and backward; the dtype that has most of them."""
    found: Counter[str] = Counter()
    counts = Counter(map(id, work.units))
    for unit in {id(unit): unit for unit in work.units}.values():
        for op, count in (*unit.forward.ops, *unit.kinds[kind].backward.ops):
            if _multiplies(op):
                found[op.dtype] += op.flops(work.micro) * count * counts[id(unit)]  # pyright: ignore
    dtype = max(found, key=found.__getitem__, default="")
    return float(sum(found.values())), dtype
