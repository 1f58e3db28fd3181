"""Seconds of a pipeline with weight gradients as actions of their own: simulates the schedule's own lists.

    start(W m, s) = max(rank is free, end(B m, s))        end = start + weights(s)

Lists are made of the seconds of stages, without messages, as a plan makes them, and run with messages. Of many
microbatches few are run: each further one takes the longest rank its F, B and W, as that rank does not wait in the
middle of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from planner.cost.seconds.pipeline import Run
from planner.fold import Fold, stage_of, stages_of
from planner.pipeline.actions import Order
from planner.pipeline.schedule import Schedule, build_schedule
from planner.pipeline.zero_bubble import StageCosts

_Event = tuple[str, int, int]  # kind, microbatch, stage


def run_waiting(
    kind: str,
    pp: int,
    vpp: int,
    num_microbatches: int,
    placed_by: StageCosts,
    costs: StageCosts,
    sent: Sequence[float] = (),
    returned: Sequence[float] = (),
) -> Run:
    """``placed_by``: seconds of each stage that decide the places of W; ``costs``: those of the run; ``sent``,
    ``returned``: of the messages across each cut."""
    few = min(num_microbatches, 4 * pp)
    schedule = _placed(kind, pp, few, vpp, StageCosts(*map(tuple, placed_by)))
    none = [0.0] * (pp * vpp - 1)
    ends = _ends(schedule.orders, schedule.fold, costs, sent or none, returned or none)
    of_rank = [
        sum(sum(of[stage] for of in costs) for stage in stages_of(rank, pp, pp * vpp, schedule.fold))
        for rank in range(pp)
    ]
    more = (num_microbatches - few) * max(of_rank)
    starts, done = [], []
    for rank, order in enumerate(schedule.orders):
        begun, ended = (_event(order, at, rank, schedule.fold, pp) for at in (0, -1))
        starts.append(ends[begun] - costs.forward[begun[2]])
        done.append(ends[ended] + more)
    return Run(max(done), tuple(starts), tuple(done))


@lru_cache(maxsize=64)
def _placed(kind: str, pp: int, num_microbatches: int, vpp: int, costs: StageCosts) -> Schedule:
    """Run twice, with messages and without: made once."""
    return build_schedule(kind, pp, num_microbatches, vpp, costs=costs)


def _event(order: Order, at: int, rank: int, fold: Fold, pp: int) -> _Event:
    action = order[at]
    return action.kind, action.microbatch, stage_of(rank, action.chunk, pp, fold)


def _ends(
    orders: Sequence[Order], fold: Fold, costs: StageCosts, sent: Sequence[float], returned: Sequence[float]
) -> dict[_Event, float]:
    """When each action ends. Ranks run as far as they can, in turn, until all are done."""
    pp = len(orders)
    of_kind = dict(zip("FBW", costs, strict=True))
    ends: dict[_Event, float] = {}
    at, free, idle, rank = [0] * pp, [0.0] * pp, 0, 0
    while idle < pp:
        first = at[rank]
        while at[rank] < len(orders[rank]):
            event = _event(orders[rank], at[rank], rank, fold, pp)
            start = _start(event, free[rank], ends, sent, returned)
            if start is None:
                break
            free[rank] = ends[event] = start + of_kind[event[0]][event[2]]
            at[rank] += 1
        idle = 0 if at[rank] > first else idle + 1
        rank = (rank + 1) % pp
    return ends


def _start(
    event: _Event, free: float, ends: dict[_Event, float], sent: Sequence[float], returned: Sequence[float]
) -> float | None:
    """When an action can start; None while a neighbour's action before it has not ended. Its own F and B are past."""
    kind, microbatch, stage = event
    if kind == "W" or (kind == "F" and not stage) or (kind == "B" and stage == len(returned)):
        return free
    needed = (kind, microbatch, stage - 1 if kind == "F" else stage + 1)
    if needed not in ends:
        return None
    return max(free, ends[needed] + (sent[stage - 1] if kind == "F" else returned[stage]))
