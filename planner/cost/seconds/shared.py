"""Seconds of a pipeline with ranks that share cores: of k ranks that compute, each has min(1, cores / k) of its speed.

The others use the time that a rank waits: on few cores the bubble of a pipeline costs little. Messages are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.fold import LOOP, Fold, stage_of
from planner.pipeline.actions import Action, Order, needs


def run_on_cores(
    orders: Sequence[Order],
    forward: Sequence[float],
    backward: Sequence[float],
    cores: float,
    fold: Fold = LOOP,
    weights: Sequence[float] = (),
) -> float:
    """``orders``: of each rank. ``forward``, ``backward``, ``weights``: seconds of each stage on a core of its own;
    ``cores``: that a pipeline has, maybe less than one."""
    of_kind = {"F": forward, "B": backward, "W": weights}
    pp = len(orders)
    done: set[tuple[str, int, int]] = set()
    at, running, now = [0] * pp, dict[int, float](), 0.0
    while True:
        for rank in range(pp):
            if rank not in running and at[rank] < len(orders[rank]):
                kind, microbatch, stage = _place(orders[rank][at[rank]], rank, pp, fold)
                if done.issuperset(needs(kind, microbatch, stage, len(forward))):
                    running[rank] = of_kind[kind][stage]
        if not running:
            assert all(position == len(order) for position, order in zip(at, orders, strict=True)), "a deadlock"
            return now
        speed = min(1.0, cores / len(running))
        least = min(running.values())
        now += least / speed
        for rank, left in list(running.items()):
            running[rank] = left - least
            if left - least <= 1e-9 * least:
                del running[rank]
                done.add(_place(orders[rank][at[rank]], rank, pp, fold))
                at[rank] += 1


def _place(action: Action, rank: int, pp: int, fold: Fold) -> tuple[str, int, int]:
    return action.kind, action.microbatch, stage_of(rank, action.chunk, pp, fold)
