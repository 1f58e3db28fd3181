"""Seconds of the units of a cut, forward and backward of one microbatch, by cause.

A collective that overlaps products costs its exposed time: seconds − overlap · min(seconds, those products). In a
schedule with W, nothing overlaps the collectives of a backward.

Kernels by the roofline (Williams, Waterman, Patterson 2009), softened for small work:

    product on a GPU    the fastest tile: rounds · processors · 2·rows·columns·(k + t) / (peak · product_fraction)
                        rounds = ⌈b · ⌈m / rows⌉ · ⌈n / columns⌉ / processors⌉: the last one leaves processors idle
    other product       2·(k + t)·b·(m + t)·(n + t) / (peak · product_fraction)
    attention           FLOPs / (peak · attention_fraction); on a GPU with heads padded to a multiple of 32, or of 64
                        above 128 features (the kernels of Dao 2023, "FlashAttention-2")
    bytes               bytes / (bandwidth · bandwidth_fraction)
    a kernel            √(launch² + max(seconds of FLOPs, seconds of bytes)²)

A GPU computes a product in tiles. On other devices, tiles at the edges are half empty on average, which costs t more
rows and columns. On both, filling the pipeline of a tile costs t more steps of k; t is the device's half_tile. A long
kernel hides the launch of the next one; a short one takes as long as a launch. The kernels of a forward or backward of
a stage take at least as long as the host needs to launch them; it launches a captured CUDA graph as one kernel.

A library has kernels for several tiles and uses the fastest. A large tile reads each operand less often; a small one
wastes less at the edges and in the last round. If there are few tiles with a long k, k is split and the parts are
added. (NVIDIA, "Matrix Multiplication Background User's Guide", sections 3.1 to 3.3: tiles, tile and wave quantization;
the relative speed of small tiles is estimated from the bytes that they read per FLOP.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import ceil
from typing import NamedTuple

from planner.cluster.cluster import Cluster, Device
from planner.cluster.links import group, seconds, wires
from planner.cost.cut.units import CutWork, Message, Op, Phase, Size, Work
from planner.mesh import BY_ROUTING, Mesh
from planner.pipeline.zero_bubble import StageCosts


class Spent(NamedTuple):
    """Seconds by cause; ``host``: time that the host needs to launch the kernels, in parallel to them."""

    compute: float = 0.0
    recompute: float = 0.0
    tp_comm: float = 0.0
    cp_comm: float = 0.0
    ep_comm: float = 0.0
    dp_comm: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return sum(self[:-1])

    def plus(self, other: Spent, times: int = 1) -> Spent:
        return Spent(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))

    def with_host(self) -> Spent:
        """Return the seconds with the host's time, as far as it exceeds that of all kernels, added to compute."""
        waits = max(0.0, self.host - self.compute - self.recompute)
        return self._replace(compute=self.compute + waits, host=0.0)


CAUSES = {"tp": "tp_comm", "cp": "cp_comm", **dict.fromkeys(BY_ROUTING, "ep_comm")}


# for a dtype that is not in a device's data sheet: similar dtypes, with relative speeds
LIKE = {"bfloat16": (("float16", 1.0), ("float32", 1.0)), "float16": (("bfloat16", 1.0), ("float32", 1.0)),
        "float64": (("float32", 0.5),), "float32": (("float64", 2.0),)}  # fmt: skip
FINE_HEADS, HEADS = 128, (32, 64)  # kernels pad heads of up to 128 features to multiples of 32, larger ones of 64


def peak_of(device: Device, dtype: str) -> float:
    """Return the peak FLOP/s of products of ``dtype``; for a dtype that is not listed, that of a similar one."""
    if dtype in device.flops:
        return device.flops[dtype]
    for other, factor in LIKE.get(dtype, ()):
        if other in device.flops:
            return device.flops[other] * factor
    return min(device.flops.values())


TILES = {(256, 128): 1.0, (128, 128): 0.95, (256, 64): 0.9, (128, 64): 0.8, (64, 64): 0.65}  # sides → relative speed
SPLITS = (1, 2, 4)  # number of parts of k
LEAST_PART = 512  # length of a part of k: adding shorter parts costs more than idle processors
ADDING = 1.03  # cost of a split product relative to one without splitting


@lru_cache(maxsize=1 << 16)
def tiled_flops(sides: tuple[int, int, int, int], processors: int, fill: int) -> float:
    """Return the FLOPs at full speed that take as long as a product of ``sides`` (b, m, n, k).

    ``fill``: steps of k in which the pipeline of a tile fills.
    """
    b, m, n, k = sides
    best = float("inf")
    for (long, short), speed in TILES.items():
        for rows, columns in {(long, short), (short, long)}:
            tiles = b * ceil(m / rows) * ceil(n / columns)
            for parts in SPLITS:
                if parts > 1 and k < LEAST_PART * parts:
                    break
                rounds = ceil(tiles * parts / processors)
                work = 2.0 * rounds * processors * rows * columns * (k / parts + fill) / speed
                best = min(best, work if parts == 1 else work * ADDING)
    return best


class Roofline:
    """The roofline model of one device. ``slower``: slowdown of ranks that share their processor."""

    def __init__(self, device: Device, slower: float = 1.0) -> None:
        self.slower = slower
        self.device = device
        self.launch = device.launch
        self.bandwidth = device.bandwidth * device.bandwidth_fraction
        self._peaks: dict[str, float] = {}

    def _peak(self, dtype: str) -> float:
        if dtype not in self._peaks:
            self._peaks[dtype] = peak_of(self.device, dtype)
        return self._peaks[dtype]

    def seconds(self, op: Op, micro: int) -> float:
        """Return the seconds of one kernel for ``micro`` sequences."""
        work = op.bytes.at(micro) / self.bandwidth
        if op.sides is not None:
            work = max(work, self._product(op.sides_at(micro)) / (self._peak(op.dtype) * self.device.product_fraction))
        elif op.attention.per or op.attention.fixed:
            speed = self._peak(op.dtype) * self.device.attention_fraction
            work = max(work, op.attention.at(micro) * self._filled(op.head) / speed)
        return self.slower * (self.launch**2 + work**2) ** 0.5

    def _product(self, sides: tuple[int, int, int, int]) -> float:
        """Return the FLOPs at full speed that take as long as the product."""
        fill = self.device.half_tile
        if self.device.processors is not None:
            return tiled_flops(sides, self.device.processors, fill)
        b, m, n, k = sides
        return 2.0 * b * (m + fill) * (n + fill) * (k + fill)

    def _filled(self, head: int) -> float:
        """Return the ratio of a head's padded features to its features, for a GPU."""
        if self.device.processors is None or not head:
            return 1.0
        step = HEADS[head > FINE_HEADS]
        return ceil(head / step) * step / head

    def all(self, ops: Iterable[tuple[Op, int]], micro: int) -> float:
        """Return the seconds of consecutive kernels, if the host launches them fast enough."""
        return sum(self.seconds(op, micro) * count for op, count in ops)

    def host(self, ops: Iterable[tuple[Op, int]], saved: int = 0) -> float:
        """Return the seconds that the host needs to launch the kernels. ``saved``: launches that CUDA graphs avoid."""
        kernels = sum(count for _, count in ops)
        return self.slower * (self.device.host or 0.0) * max(0, kernels - saved)

    def moving(self, num_bytes: float) -> float:
        """Return the seconds of a kernel that only moves bytes."""
        return self.slower * (self.launch**2 + (num_bytes / self.bandwidth) ** 2) ** 0.5 if num_bytes else 0.0


class Pricing:
    """The seconds of kernels and collectives, for a mesh on a cluster."""

    def __init__(self, mesh: Mesh, cluster: Cluster, slower: float = 1.0) -> None:
        self.mesh, self.cluster = mesh, cluster
        self.roofline, self.wires = Roofline(cluster.device, slower), wires(cluster, slower)

    def message(self, message: Message, micro: int, *, alone: bool = False) -> float:
        """Return the exposed seconds of a collective. ``alone``: no product overlaps it."""
        whole = self.collective(message.kind, message.axis, message.bytes.at(micro))
        if alone:
            return whole
        beside = sum(self.roofline.seconds(op, micro) for op in message.beside)
        return whole - self.cluster.overlap * min(whole, beside)

    def collective(self, kind: str, axis: str, num_bytes: float) -> float:
        return seconds(kind, num_bytes, group(self.mesh, axis, self.cluster), self.wires)

    def phase(self, phase: Phase, micro: int, *, again: bool = False, alone: bool = False) -> Spent:
        spent = dict.fromkeys(Spent._fields, 0.0)
        spent["recompute" if again else "compute"] = self.roofline.all(phase.ops, micro)
        spent["host"] = self.roofline.host(phase.ops, phase.saved)
        for message, count in phase.messages:
            cause = "recompute" if again else CAUSES.get(message.axis, "dp_comm")
            spent[cause] += count * self.message(message, micro, alone=alone)
        return Spent(**spent)


class UnitSeconds(NamedTuple):
    """The seconds of one microbatch on one unit or stage. ``weights``: of a W; without W they are in ``backward``."""

    forward: Spent = Spent()
    backward: Spent = Spent()
    weights: Spent = Spent()

    @property
    def total(self) -> float:
        return sum(spent.total for spent in self)

    def plus(self, other: UnitSeconds) -> UnitSeconds:
        return UnitSeconds(*map(Spent.plus, self, other))

    def with_host(self) -> UnitSeconds:
        """Return the seconds with the host's exposed launch time in each phase."""
        return UnitSeconds(*map(Spent.with_host, self))


def _seconds(work: Work, pricing: Pricing, micro: int, *, waits: bool) -> UnitSeconds:
    """Return the seconds of ``work``. ``waits``: weight gradients are separate actions (W)."""
    forward, backward = pricing.phase(work.forward, micro), work.backward
    if not waits:
        return UnitSeconds(forward, pricing.phase(backward, micro))
    later = dict(work.weights.ops)
    rest = replace(backward, ops=tuple((op, count - later.get(op, 0)) for op, count in backward.ops))
    return UnitSeconds(forward, pricing.phase(rest, micro, alone=True), pricing.phase(work.weights, micro))


class WorkSeconds:
    """The seconds of all units of a cut under one kind of recomputation, and their sums over ranges.

    ``until``: prefix sums of the seconds of units, without waits for the host; ``forward_until``: of forwards alone.
    ``waits``: weight gradients are separate actions (W).
    """

    def __init__(self, work: CutWork, kind: str, pricing: Pricing, *, waits: bool = False) -> None:
        of_unit, micro = dict[int, UnitSeconds](), work.micro
        for unit in {id(unit): unit for unit in work.units}.values():
            once = _seconds(unit.work, pricing, micro, waits=waits)
            again = pricing.phase(unit.again[kind], micro, again=True)
            of_unit[id(unit)] = once._replace(backward=once.backward.plus(again))
        self.units = [of_unit[id(unit)] for unit in work.units]
        self.flops, self.dtype = flops_of(work)
        self.shared = [(s, _seconds(s.work, pricing, micro, waits=waits)) for s in work.shared]
        self.until = [0.0, *accumulate(unit.total for unit in self.units)]
        self.forward_until = [0.0, *accumulate(unit.forward.total for unit in self.units)]

    def stage(self, first: int, end: int) -> UnitSeconds:
        total = UnitSeconds()
        for unit in self.units[first:end]:
            total = total.plus(unit)
        for shared, spent in self.shared:
            if shared.is_in(first, end):
                total = total.plus(spent)
        return total.with_host()


def flops_of_stages(work: CutWork, kind: str, ranges: Sequence[tuple[int, int]]) -> StageCosts:
    """Return the FLOPs of products of one microbatch on each stage: forward, backward without weight gradients, weight
    gradients.
    """

    def of_ops(phases: Iterable[Phase]) -> float:
        return sum(op.flops(work.micro) * count for phase in phases for op, count in phase.ops if _multiplies(op))

    def of_stage(first: int, end: int) -> tuple[float, float, float]:
        units = work.units[first:end]
        parts = [unit.work for unit in units] + [s.work for s in work.shared if s.is_in(first, end)]
        weights = of_ops(part.weights for part in parts)
        backward = of_ops(part.backward for part in parts) + of_ops(unit.again[kind] for unit in units)
        return of_ops(part.forward for part in parts), backward - weights, weights

    return StageCosts(*(list(side) for side in zip(*(of_stage(*of) for of in ranges), strict=True)))


def _multiplies(op: Op) -> bool:
    return op.sides is not None or op.attention != Size()


def flops_of(work: CutWork) -> tuple[float, str]:
    """Return the FLOPs of products of all units for one microbatch, and the dtype with most of them."""
    by_dtype: Counter[str] = Counter()
    counts = Counter(map(id, work.units))
    for unit in {id(unit): unit for unit in work.units}.values():
        for op, count in (*unit.work.forward.ops, *unit.work.backward.ops):
            if _multiplies(op):
                by_dtype[op.dtype] += op.flops(work.micro) * count * counts[id(unit)]  # pyright: ignore
    return float(sum(by_dtype.values())), max(by_dtype, key=by_dtype.__getitem__, default="")
