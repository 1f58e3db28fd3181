"""Contiguous ranges of costs with the least possible largest sum."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def balance(costs: Sequence[int], num_stages: int) -> list[int]:
    """Sizes of ``num_stages`` non-empty contiguous ranges of ``costs`` with the least possible largest sum.

    Among those the most even ones (least sum of squares), then those with the fewest blocks in the first stages, which
    hold the most microbatches in flight.
    """
    assert 1 <= num_stages <= len(costs), "more stages than blocks"
    total = [0, *accumulate(costs)]
    return _most_even(total, num_stages, _least_maximum(total, num_stages))


def _least_maximum(total: list[int], num_stages: int) -> int:
    """best(k, i) = min over j of max(best(k - 1, j), cost of j to i): the first grows with j, the second falls."""
    num_blocks = len(total) - 1
    best = total[1:]  # best[i - 1] for the first i blocks in one stage
    for k in range(2, num_stages + 1):
        row = [0] * num_blocks
        for i in range(k, num_blocks + 1):
            splits = range(k - 1, i)
            cross = bisect_left(splits, 0, key=lambda j, i=i, best=best: best[j - 1] - (total[i] - total[j]))
            near = [splits[c] for c in (cross - 1, cross) if 0 <= c < len(splits)]
            row[i - 1] = min(max(best[j - 1], total[i] - total[j]) for j in near)
        best = row
    return best[-1]


def _most_even(total: list[int], num_stages: int, limit: int) -> list[int]:
    """The sizes with the least sum of squared costs among those with no stage that costs more than ``limit``."""
    num_blocks = len(total) - 1
    # after[i] = (sum of squares, sizes) of the blocks from i on in the k stages still to fill
    after: list[tuple[int, tuple[int, ...]] | None] = [None] * num_blocks + [(0, ())]
    for _ in range(num_stages):
        row: list[tuple[int, tuple[int, ...]] | None] = [None] * (num_blocks + 1)
        for i in range(num_blocks):
            options = []
            for j in range(i + 1, num_blocks + 1):
                cost = total[j] - total[i]
                if cost > limit:
                    break
                if (rest := after[j]) is not None:
                    options.append((rest[0] + cost * cost, (j - i, *rest[1])))
            row[i] = min(options, default=None)
        after = row
    assert after[0] is not None
    return list(after[0][1])
