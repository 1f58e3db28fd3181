"""Products of a GPU, tile by tile: each processor computes one tile of the result at a time, in rounds.

    rounds = ⌈b · ⌈m / rows⌉ · ⌈n / columns⌉ / processors⌉          the last one leaves processors idle

A library has kernels of several tiles and takes the fastest. A large tile reads each operand less often; a small one
leaves less of an edge and of the last round empty. If few tiles have a long k, it is split, and the parts are added.
Tiles and their order are those of NVIDIA, "Matrix Multiplication Background User's Guide", sections 3.1 (tiles),
3.2 (tile quantization) and 3.3 (wave quantization); the speed of a small tile beside the largest is an estimate from
the bytes that it reads for each operation.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

TILES = {(256, 128): 1.0, (128, 128): 0.95, (256, 64): 0.9, (128, 64): 0.8, (64, 64): 0.65}  # sides → relative speed
SPLITS = (1, 2, 4)  # parts of k
LEAST_PART = 512  # of k: with less, adding the parts costs more than idle processors
ADDING = 1.03  # a product in parts, relative to one


@lru_cache(maxsize=1 << 16)
def tiled_flops(sides: tuple[int, int, int, int], processors: int, fill: int) -> float:
    """Operations that the device could do at its full speed while it computes a product of ``sides`` (b, m, n, k).

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
