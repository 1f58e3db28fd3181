"""Seconds of a kernel on a device, by the roofline (Williams, Waterman, Patterson 2009), softened for small work.

    product on a GPU    the fastest tile: rounds · tiles at once · 2·rows·columns·(k + t) / (peak · product_fraction)
    other product       2·(k + t)·b·(m + t)·(n + t) / (peak · product_fraction)
    attention           its operations / (peak · attention_fraction); on a GPU of heads filled up to a multiple of 32,
                        above 128 features of 64 (the kernels of Dao 2023, "FlashAttention-2")
    bytes               bytes / (bandwidth · bandwidth_fraction)
    a kernel            √(launch² + max(operations, bytes)²)

A GPU computes a product in tiles, one at a time on each of its processors (planner.cost.seconds.tiles). Elsewhere a
tile at an edge is half empty on average, which costs t more rows and columns. In both, k must fill the pipeline of a
tile once, which costs t more steps; t is the device's half_tile. Attention heads and shards over many ranks lose this
way. A kernel that takes long hides the launch of the next; one that does not takes as long as a launch. The kernels of
a pass of a stage take at least as long as its host needs to launch them; it launches a captured CUDA graph as one
kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from planner.cluster.cluster import Device
from planner.cost.cut.kernels import Op
from planner.cost.seconds.tiles import tiled_flops

# if a device's sheet does not name a dtype: the same speed as another, or a part of it
LIKE = {"bfloat16": (("float16", 1.0), ("float32", 1.0)), "float16": (("bfloat16", 1.0), ("float32", 1.0)),
        "float64": (("float32", 0.5),), "float32": (("float64", 2.0),)}  # fmt: skip

FINE_HEADS, HEADS = 128, (32, 64)  # features of a head up to which kernels have the finer step, and both steps


def peak_of(device: Device, dtype: str) -> float:
    """Operations a second of products of ``dtype``; of a dtype that is not listed, those of its neighbour."""
    if dtype in device.flops:
        return device.flops[dtype]
    for other, factor in LIKE.get(dtype, ()):
        if other in device.flops:
            return device.flops[other] * factor
    return min(device.flops.values())


class Roofline:
    """Of one device. ``slower``: the slowdown of devices that share their processor."""

    def __init__(self, device: Device, slower: float = 1.0) -> None:
        self.slower = slower
        self.device = device
        self.launch = device.launch
        self.bandwidth = device.bandwidth * device.bandwidth_fraction
        self._peaks: dict[str, float] = {}

    def _peak(self, dtype: str) -> float:
        found = self._peaks.get(dtype)
        if found is None:
            found = self._peaks[dtype] = peak_of(self.device, dtype)
        return found

    def seconds(self, op: Op, micro: int) -> float:
        work = op.bytes.at(micro) / self.bandwidth
        if op.sides is not None:
            work = max(work, self._product(op.sides_at(micro)) / (self._peak(op.dtype) * self.device.product_fraction))
        elif op.attention.per or op.attention.fixed:
            speed = self._peak(op.dtype) * self.device.attention_fraction
            work = max(work, op.attention.at(micro) * self._filled(op.head) / speed)
        return self.slower * (self.launch**2 + work**2) ** 0.5

    def _product(self, sides: tuple[int, int, int, int]) -> float:
        """Operations at full speed that take as long as the product."""
        fill = self.device.half_tile
        if self.device.processors is not None:
            return tiled_flops(sides, self.device.processors, fill)
        b, m, n, k = sides
        return 2.0 * b * (m + fill) * (n + fill) * (k + fill)

    def _filled(self, head: int) -> float:
        """How many times as many features a GPU's attention computes as a head has."""
        if self.device.processors is None or not head:
            return 1.0
        step = HEADS[head > FINE_HEADS]
        return ceil(head / step) * step / head

    def all(self, ops: Iterable[tuple[Op, int]], micro: int) -> float:
        """Of kernels one after the other, if the host launches them as fast."""
        return sum(self.seconds(op, micro) * count for op, count in ops)

    def host(self, ops: Iterable[tuple[Op, int]], saved: int = 0) -> float:
        """Of the host that launches them. ``saved``: launches that it need not make, because a CUDA graph launches
        several kernels at once.
        """
        kernels = sum(count for _, count in ops)
        return self.slower * (self.device.host or 0.0) * max(0, kernels - saved)

    def moving(self, num_bytes: float) -> float:
        """Of a kernel that only moves bytes."""
        return self.slower * (self.launch**2 + (num_bytes / self.bandwidth) ** 2) ** 0.5 if num_bytes else 0.0
