"""Seconds of a kernel on a device, by the roofline (Williams, Waterman, Patterson 2009), softened for small work.

    product      2·(k + t)·(b·(m + t)·(n + t) + (p − 1)·2t²)  /  (peak · product_fraction)
    attention    its operations / (peak · attention_fraction)
    bytes        bytes / (bandwidth · bandwidth_fraction)
    a kernel     √(launch² + max(operations, bytes)²)

Products are computed in tiles of 2t by 2t, t the device's half_tile. A tile at an edge is half empty on average, which
costs t more rows and columns; and k must fill the pipeline of a tile once, which costs t more steps. So a product with
a side of t runs at half its speed, and one with sides of thousands as it should: attention heads and shards over many
ranks lose this way. p tiles, one for each of the device's processors, are computed at once, and the last of them leave
half of p idle on average: products with a small result, such as the gradient of a sharded weight, lose this way. A
kernel that takes long hides the launch of the next; one that does not takes as long as a launch.
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.cluster.cluster import Device
from planner.cost.cut.kernels import Op

# if a device's sheet does not name a dtype: the same speed as another, or a part of it
LIKE = {"bfloat16": (("float16", 1.0), ("float32", 1.0)), "float16": (("bfloat16", 1.0), ("float32", 1.0)),
        "float64": (("float32", 0.5),), "float32": (("float64", 2.0),)}  # fmt: skip


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
        self.idle = ((device.processors or 1) - 1) * 2 * device.half_tile**2
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
            b, m, n, k = op.sides_at(micro)
            tile = self.device.half_tile
            results = b * (m + tile) * (n + tile) + self.idle
            work = max(work, 2.0 * results * (k + tile) / (self._peak(op.dtype) * self.device.product_fraction))
        elif op.attention.per or op.attention.fixed:
            work = max(work, op.attention.at(micro) / (self._peak(op.dtype) * self.device.attention_fraction))
        return self.slower * (self.launch**2 + work**2) ** 0.5

    def all(self, ops: Iterable[tuple[Op, int]], micro: int) -> float:
        return sum(self.seconds(op, micro) * count for op, count in ops)

    def moving(self, num_bytes: float) -> float:
        """Of a kernel that only moves bytes."""
        return self.slower * (self.launch**2 + (num_bytes / self.bandwidth) ** 2) ** 0.5 if num_bytes else 0.0
