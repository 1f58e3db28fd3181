"""The one clock: when each action of a pipeline ends, by the times of its stages and messages.

    start(F m, s) = max(rank is free, end(F m, s−1) + message)
    start(B m, s) = max(rank is free, end(F m, s), end(B m, s+1) + message)
    start(W m, s) = max(rank is free, end(B m, s))        end = start + the stage's time

The rule only adds and takes maxima, so once all actions of three periods (a microbatch of 1f1b, a group of
interleaved_1f1b) in a row end later than those of the period before by one and the same λ, on all ranks, the next ones
do too: an action waits for others at most two periods back. Then M microbatches take (M − M')/period · λ longer than
M'. That is exact in integers, so ``run_table`` counts picoseconds. Of a kind with W, ``run_waiting`` lets each further
microbatch take the longest rank its F, B and W, as that rank does not wait in the middle of a step.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from planner.fold import Fold, stage_of, stages_of
from planner.pipeline.actions import Order, needs
from planner.pipeline.kinds import KINDS, Sizes
from planner.pipeline.schedule import Schedule, build_schedule, in_turn, num_warmup, schedule_table
from planner.pipeline.zero_bubble import StageCosts

PICO = 1e12
NEVER = -1
_ALIKE = 3  # periods in a row
KINDS_OF_ACTIONS = "FBW"

# the actions of a rank in their order: kind k of microbatch m on stage s is (k·stages + s)·count + m
Numbers = list[int]


class ClockRun(NamedTuple):
    """Seconds: of the full run; the begin and the end of each rank's work."""

    seconds: float
    starts: tuple[float, ...]
    ends: tuple[float, ...]


class Delays(NamedTuple):
    """Of the messages across each boundary between stages: of values, and of the gradients that come back."""

    sent: Sequence[Any]
    returned: Sequence[Any]


def numbered(orders: Iterable[Order], pp: int, num_stages: int, count: int, fold: Fold) -> list[Numbers]:
    """``orders`` of ``count`` microbatches as numbers."""
    of_kind = {kind: at * num_stages * count for at, kind in enumerate(KINDS_OF_ACTIONS)}
    return [
        [of_kind[kind] + stage_of(rank, chunk, pp, fold) * count + microbatch for kind, microbatch, chunk in order]
        for rank, order in enumerate(orders)
    ]


def end_times(orders: Sequence[Numbers], costs: StageCosts, count: int, delays: Delays | None = None) -> list[Any]:
    """The end of each action, by number; NEVER of those that wait for ever. ``costs``: numbers of any kind, ≥ 0.

    Ranks run as far as they can, in turn, until none can: so all is run that lock step would run.
    """
    rows, pp = list(_rows(costs, count, delays)), len(orders)
    ends: list[Any] = [NEVER] * (len(KINDS_OF_ACTIONS) * len(costs.forward) * count)
    free: list[Any] = [0] * pp
    at, rank, idle = [0] * pp, 0, 0
    lengths = [len(order) for order in orders]
    while idle < pp:
        order, position, now = orders[rank], at[rank], free[rank]
        first, length = position, lengths[rank]
        while position < length:
            action = order[position]
            before, message, time = rows[action // count]
            if before:
                end = ends[action + before]
                if end < 0:
                    break
                end += message
                if end > now:
                    now = end
            ends[action] = now = now + time
            position += 1
        idle = 0 if position > first else idle + 1
        at[rank], free[rank] = position, now
        rank = rank + 1 if rank + 1 < pp else 0
    return ends


def _rows(costs: StageCosts, count: int, delays: Delays | None) -> Iterator[tuple[int, Any, Any]]:
    """Of each kind on each stage: from its number to that of the action that it waits for (0: none), the message of
    that, and its own time. Of several that it waits for the last one: all others have ended by then.
    """
    num_stages = len(costs.forward)
    for own, (kind, times) in enumerate(zip(KINDS_OF_ACTIONS, costs, strict=True)):
        for stage, time in enumerate(times):
            found = needs(kind, 0, stage, num_stages)
            if not found:
                yield 0, 0, time
                continue
            need, _, at = found[-1]
            message = 0
            if delays is not None and at != stage:
                message = delays.sent[at] if kind == "F" else delays.returned[stage]
            yield ((KINDS_OF_ACTIONS.index(need) - own) * num_stages + at - stage) * count, message, time


def run_table(kind: str, sizes: Sizes, costs: StageCosts, delays: Delays | None = None) -> ClockRun:
    """A kind with an order that follows from the schedule table, by seconds."""
    forward, backward, _ = costs
    pp, num_microbatches, vpp, group = sizes
    if pp == 1:
        total = num_microbatches * (sum(forward) + sum(backward))
        return ClockRun(total, (0.0,), (total,))
    ticks = StageCosts(_picoseconds(forward), _picoseconds(backward), ())
    later = None if delays is None else Delays(*map(_picoseconds, delays))
    period = group if vpp > 1 else 1
    few = num_microbatches
    if KINDS[kind].repeats:
        least = 2 * pp + 6 * period
        few = min(num_microbatches, least + (num_microbatches - least) % period)
    while True:
        tried = sizes._replace(num_microbatches=few)
        orders = _of_table(kind, tried)
        ends = end_times(orders, ticks, few, later)
        more = 0
        if few < num_microbatches:
            grown = _growth(orders, ends, kind, tried, period)
            if grown is None:
                few = min(num_microbatches, 2 * few + (num_microbatches - 2 * few) % period)
                continue
            more = (num_microbatches - few) // period * grown
        done = [ends[order[-1]] + more for order in orders]
        starts = [ends[order[0]] - ticks.forward[rank] for rank, order in enumerate(orders)]
        return ClockRun(max(done) / PICO, tuple(s / PICO for s in starts), tuple(e / PICO for e in done))


def run_waiting(
    kind: str, sizes: Sizes, placed_by: StageCosts, costs: StageCosts, delays: Delays | None = None
) -> ClockRun:
    """A kind with W. ``placed_by``: seconds of each stage that decide the places of W, as in a plan; ``costs``: those
    of the run."""
    few = sizes._replace(num_microbatches=min(sizes.num_microbatches, 4 * sizes.pp))
    schedule = _placed(kind, few, StageCosts(*map(tuple, placed_by)))
    return run_orders(schedule.orders, schedule.fold, sizes.num_microbatches, costs, delays, few.num_microbatches)


def run_orders(
    of_ranks: Sequence[Order],
    fold: Fold,
    num_microbatches: int,
    costs: StageCosts,
    delays: Delays | None = None,
    few: int | None = None,
) -> ClockRun:
    """Orders of ``few`` microbatches, all if not given; each further one takes the work of the busiest rank."""
    pp, num_stages, few = len(of_ranks), len(costs.forward), few or num_microbatches
    orders = numbered(of_ranks, pp, num_stages, few, fold)
    ends = end_times(orders, costs, few, delays)
    own = [stages_of(rank, pp, num_stages, fold) for rank in range(pp)]
    more = (num_microbatches - few) * max(sum(sum(of[stage] for of in costs) for stage in stages) for stages in own)
    starts = tuple(ends[order[0]] - costs.forward[own[rank][0]] for rank, order in enumerate(orders))
    done = tuple(ends[order[-1]] + more for order in orders)
    return ClockRun(max(done), starts, done)


@lru_cache(maxsize=64)
def _placed(kind: str, sizes: Sizes, costs: StageCosts) -> Schedule:
    """Run twice, with messages and without: made once."""
    return build_schedule(kind, *sizes, costs=costs)


def _picoseconds(seconds: Sequence[float]) -> tuple[int, ...]:
    return tuple(round(x * PICO) for x in seconds)


def _of_table(kind: str, sizes: Sizes) -> list[Numbers]:
    """``numbered`` of the schedule, without its actions: a search runs many."""
    pp, count, vpp, _ = sizes
    table, half, found = schedule_table(sizes), pp * vpp * count, []
    for rank in range(pp):
        forwards = [(c * pp + rank) * count + m for m, c in table]
        backwards = [half + ((vpp - 1 - c) * pp + rank) * count + m for m, c in table]
        found.append(in_turn(forwards, backwards, num_warmup(kind, sizes, rank)))
    return found


def _growth(orders: list[Numbers], ends: list[int], kind: str, sizes: Sizes, period: int) -> int | None:
    """By how much each period ends later than the one before, if the last steady ones all agree; else None."""
    size = 2 * period * sizes.vpp  # actions of a period
    growth: int | None = None
    for rank, order in enumerate(orders):
        warmup = num_warmup(kind, sizes, rank)
        steady = len(order) - 2 * warmup
        if steady < (_ALIKE + 1) * size:
            return None
        end = warmup + steady // size * size
        for place in range(end - _ALIKE * size, end):
            grown = ends[order[place]] - ends[order[place - size]]
            if growth is None:
                growth = grown
            elif grown != growth:
                return None
    return growth
