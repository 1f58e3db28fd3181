"""Fresh normal values, drawn in blocks: each rank draws the blocks that its shard is in, on several threads.

    flat tensor    | block 0 | block 1 | … | block n |      64 Ki elements each, the last one shorter
    block b        N(0, std) from a generator of (seed, name, b)

So a value depends on the seed, the name, the shape and its place alone: not on the layout, the number of threads or the
device. Drawn in float32 whatever the dtype: precisions start from the same weights.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch
from torch import Tensor

from runtime.distributed.devices import launched

BLOCK = 1 << 16


def normal(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    seed: int,
    std: float,
    rows: tuple[int, int] | None = None,
    num_threads: int | None = None,
) -> Tensor:
    """The full tensor [shape], or its ``rows`` (half open) along dim 0, on the CPU."""
    size, row = prod(shape), prod(shape[1:])
    start, stop = (0, size) if rows is None else (rows[0] * row, rows[1] * row)
    drawn = torch.empty(stop - start, dtype=dtype)

    def draw(block: int) -> None:
        first, last = block * BLOCK, min((block + 1) * BLOCK, size)
        values = torch.randn(last - first, generator=_generator(seed, name, block), dtype=torch.float32)
        low, high = max(first, start), min(last, stop)
        drawn[low - start : high - start].copy_(values[low - first : high - first].mul_(std))

    blocks = blocks_of(start, stop)
    num_threads = min(len(blocks), num_threads or _num_threads())
    if num_threads > 1:  # drawing releases the interpreter lock
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(draw, blocks))
    else:
        for block in blocks:
            draw(block)
    return drawn.view(shape if rows is None else (rows[1] - rows[0], *shape[1:]))


def blocks_of(start: int, stop: int) -> range:
    """The blocks that hold the elements from ``start`` to before ``stop``."""
    return range(start // BLOCK, -(-stop // BLOCK)) if stop > start else range(0)


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _num_threads() -> int:
    """This rank's part of the cores that the process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // (launched(os.environ).local_world_size or 1))
