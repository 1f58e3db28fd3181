"""Seconds of the units of a cut, forward and backward of one microbatch, by cause.

A collective that runs beside products costs what is left of it: seconds − overlap · min(seconds, those products).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from itertools import accumulate

from planner.cluster.cluster import Cluster
from planner.cluster.links import group, seconds, wires
from planner.cost.cut.ops import Size
from planner.cost.cut.units import CutWork, Message, Phase, UnitWork
from planner.cost.seconds.roofline import Roofline
from planner.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by cause."""

    compute: float = 0.0
    recompute: float = 0.0
    tp_comm: float = 0.0
    cp_comm: float = 0.0
    ep_comm: float = 0.0
    dp_comm: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.recompute + self.tp_comm + self.cp_comm + self.ep_comm + self.dp_comm

    def plus(self, other: Spent, times: int = 1) -> Spent:
        return Spent(*(getattr(self, f.name) + times * getattr(other, f.name) for f in fields(Spent)))


CAUSES = {"tp": "tp_comm", "cp": "cp_comm", "ep": "ep_comm", "etp": "ep_comm"}


class Pricing:
    """What a mesh on a cluster asks for kernels and collectives. Owns: the links of each axis."""

    def __init__(self, mesh: Mesh, cluster: Cluster, slower: float = 1.0) -> None:
        self.mesh, self.cluster = mesh, cluster
        self.roofline, self.wires = Roofline(cluster.device, slower), wires(cluster, slower)

    def message(self, message: Message, micro: int) -> float:
        """Seconds that the rank waits for it."""
        whole = self.collective(message.kind, message.axis, message.bytes.at(micro))
        beside = sum(self.roofline.seconds(op, micro) for op in message.beside)
        return whole - self.cluster.overlap * min(whole, beside)

    def collective(self, kind: str, axis: str, num_bytes: float) -> float:
        return seconds(kind, num_bytes, group(self.mesh, axis, self.cluster), self.wires)

    def phase(self, phase: Phase, micro: int, *, again: bool = False) -> Spent:
        computed = self.roofline.all(phase.ops, micro)
        spent = dict.fromkeys((f.name for f in fields(Spent)), 0.0)
        spent["recompute" if again else "compute"] = computed
        for message, count in phase.messages:
            cause = "recompute" if again else CAUSES.get(message.axis, "dp_comm")
            spent[cause] += count * self.message(message, micro)
        return Spent(**spent)


NO_SECONDS = Spent()


@dataclass(frozen=True, slots=True)
class UnitSeconds:
    """Of one unit, or stage, and one microbatch."""

    forward: Spent = NO_SECONDS
    backward: Spent = NO_SECONDS

    def plus(self, other: UnitSeconds) -> UnitSeconds:
        return UnitSeconds(self.forward.plus(other.forward), self.backward.plus(other.backward))


def unit_seconds(unit: UnitWork, kind: str, pricing: Pricing, micro: int) -> UnitSeconds:
    """Forward; backward with what is computed again for it."""
    work = unit.kinds[kind]
    backward = pricing.phase(work.backward, micro).plus(pricing.phase(work.again, micro, again=True))
    return UnitSeconds(pricing.phase(unit.forward, micro), backward)


class WorkSeconds:
    """Seconds of all units of a cut under one kind of recompute, and their sums over ranges.

    ``until``: forward and backward of the units before each, and of all.
    """

    def __init__(self, work: CutWork, kind: str, pricing: Pricing) -> None:
        found: dict[int, UnitSeconds] = {}
        for unit in work.units:
            if id(unit) not in found:
                found[id(unit)] = unit_seconds(unit, kind, pricing, work.micro)
        self.units = [found[id(unit)] for unit in work.units]
        phase, micro = pricing.phase, work.micro
        self.flops, self.dtype = flops_of(work, kind)
        self.shared = [(s, UnitSeconds(phase(s.forward, micro), phase(s.backward, micro))) for s in work.shared]
        self.until = [0.0, *accumulate(unit.forward.total + unit.backward.total for unit in self.units)]

    def stage(self, first: int, end: int) -> UnitSeconds:
        """Of a stage of units [first, end)."""
        total = UnitSeconds()
        for unit in self.units[first:end]:
            total = total.plus(unit)
        for shared, spent in self.shared:
            if shared.is_in(first, end):
                total = total.plus(spent)
        return total


def flops_of(work: CutWork, kind: str) -> tuple[float, str]:
    """Operations of products of all units for one microbatch, forward and backward; the dtype that has most of them."""
    found: Counter[str] = Counter()
    counts = Counter(map(id, work.units))
    for unit in {id(unit): unit for unit in work.units}.values():
        for op, count in (*unit.forward.ops, *unit.kinds[kind].backward.ops):
            if op.sides is not None or op.attention != Size():
                found[op.dtype] += op.flops(work.micro) * count * counts[id(unit)]  # pyright: ignore
    dtype = max(found, key=found.__getitem__, default="")
    return float(sum(found.values())), dtype
