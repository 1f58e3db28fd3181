"""The place of one action in a schedule: the grid of steps and ranks around it, for the error of its rank.

step  rank0  rank1
2     F2.0   F1.0
3     B0.0   >B1.0<
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.errors import PlanError
from planner.fold import LOOP, Fold
from planner.pipeline.schedule import CUSTOM, FORWARD_ONLY, Action, Order, Schedule
from planner.pipeline.simulate import format_grid, simulate

MOST_STEPS, MOST_RANKS = 20, 16


def grid_around(orders: Sequence[Order], rank: int, action: Action, fold: Fold = LOOP) -> str:
    """The steps and pp ranks next to ``action`` of ``rank``, which is marked; each action is taken to last one step."""
    actions = [a for order in orders for a in order]
    kind = CUSTOM if any(a.kind == "B" for a in actions) else FORWARD_ONLY
    num_chunks, num_microbatches = 1 + max(a.chunk for a in actions), 1 + max(a.microbatch for a in actions)
    sizes = (len(orders), num_chunks, num_microbatches, len(orders))
    try:
        steps = simulate(Schedule(kind, *sizes, tuple(orders), fold)).steps
    except PlanError as error:  # the schedule itself may be the cause of the failure
        return f"{action} of pp rank {rank}; the schedule has no steps: {error.what}"
    at = next(i for i, row in enumerate(steps) if row[rank] == action)
    first, first_rank = _around(at, len(steps), MOST_STEPS), _around(rank, len(orders), MOST_RANKS)
    shown = tuple(row[first_rank : first_rank + MOST_RANKS] for row in steps[first : first + MOST_STEPS])
    return format_grid(shown, first, first_rank, marked=(at - first, rank - first_rank))


def _around(place: int, count: int, most: int) -> int:
    """The first of at most ``most`` of ``count``, with ``place`` in their middle if possible."""
    return max(0, min(place - most // 2, count - most))
