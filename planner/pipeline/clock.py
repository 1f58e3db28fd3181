"""The pipeline clock: when each action ends, from the seconds of each stage and message.

    start(F m, s) = max(rank is free, end(F m, s−1) + message)
    start(B m, s) = max(rank is free, end(F m, s), end(B m, s+1) + message)
    start(W m, s) = max(rank is free, end(B m, s))        end = start + the stage's time

A period is one microbatch of 1f1b, or one group of interleaved_1f1b. These equations only add and take maxima, and an
action depends on actions at most two periods back. So once every action of three consecutive periods ends the same λ
after its counterpart in the previous period, on all ranks, all later periods do too, and M microbatches take
(M − M')/period · λ longer than M'. This is exact in integers, so ``run_table`` counts picoseconds. For a kind with W,
``run_waiting`` charges each further microbatch F + B + W of the busiest rank, which never idles in mid-step.
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
_STEADY_PERIODS = 3  # consecutive periods with the same λ that prove a steady state
KINDS_OF_ACTIONS = "FBW"

# a rank's order in numbers: kind k of microbatch m on stage s is (k·stages + s)·num_microbatches + m
Numbers = list[int]


class ClockRun(NamedTuple):
    """Seconds of the whole run, and when the first action of each rank starts and its last one ends."""

    seconds: float
    starts: tuple[float, ...]
    ends: tuple[float, ...]


class Delays(NamedTuple):
    """Time of a message over each stage boundary: activations ``sent`` forward, gradients ``returned``."""

    sent: Sequence[Any]
    returned: Sequence[Any]


def numbered(orders: Iterable[Order], pp: int, num_stages: int, count: int, fold: Fold) -> list[Numbers]:
    """Return ``orders``, of ``count`` microbatches, with each action as its number."""
    first_of = {kind: index * num_stages * count for index, kind in enumerate(KINDS_OF_ACTIONS)}
    return [
        [first_of[kind] + stage_of(rank, chunk, pp, fold) * count + microbatch for kind, microbatch, chunk in order]
        for rank, order in enumerate(orders)
    ]


def end_times(orders: Sequence[Numbers], costs: StageCosts, count: int, delays: Delays | None = None) -> list[Any]:
    """Return the end time of each action, by its number; NEVER for an action in a deadlock. ``costs`` are ≥ 0.

    Each rank in turn runs until its next action has to wait; a full round without progress ends the run.
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
    """Yield, for each kind of action on each stage: the number of its last dependency relative to its own (0: none),
    the time of the message from that dependency, and its own time. Earlier dependencies end before the last one.
    """
    num_stages = len(costs.forward)
    for own, (kind, times) in enumerate(zip(KINDS_OF_ACTIONS, costs, strict=True)):
        for stage, time in enumerate(times):
            dependencies = needs(kind, 0, stage, num_stages)
            if not dependencies:
                yield 0, 0, time
                continue
            need, _, at = dependencies[-1]
            message = 0
            if delays is not None and at != stage:
                message = delays.sent[at] if kind == "F" else delays.returned[stage]
            yield ((KINDS_OF_ACTIONS.index(need) - own) * num_stages + at - stage) * count, message, time


def run_table(kind: str, sizes: Sizes, costs: StageCosts, delays: Delays | None = None) -> ClockRun:
    """Run a schedule kind without W; its orders follow from the schedule table. ``costs``: seconds of each stage."""
    forward, backward, _ = costs
    pp, num_microbatches, vpp, group = sizes
    if pp == 1:
        total = num_microbatches * (sum(forward) + sum(backward))
        return ClockRun(total, (0.0,), (total,))
    ticks = StageCosts(_picoseconds(forward), _picoseconds(backward), ())
    later = None if delays is None else Delays(*map(_picoseconds, delays))
    period = group if vpp > 1 else 1
    count = num_microbatches
    if KINDS[kind].repeats:
        least = 2 * pp + 6 * period
        count = min(num_microbatches, least + (num_microbatches - least) % period)
    while True:
        shortened = sizes._replace(num_microbatches=count)
        orders = _of_table(kind, shortened)
        ends = end_times(orders, ticks, count, later)
        more = 0
        if count < num_microbatches:
            growth = _growth(orders, ends, kind, shortened, period)
            if growth is None:
                count = min(num_microbatches, 2 * count + (num_microbatches - 2 * count) % period)
                continue
            more = (num_microbatches - count) // period * growth
        done = [ends[order[-1]] + more for order in orders]
        starts = [ends[order[0]] - ticks.forward[rank] for rank, order in enumerate(orders)]
        return ClockRun(max(done) / PICO, tuple(s / PICO for s in starts), tuple(e / PICO for e in done))


def run_waiting(
    kind: str, sizes: Sizes, placed_by: StageCosts, costs: StageCosts, delays: Delays | None = None
) -> ClockRun:
    """Run a schedule kind with W. The planned seconds ``placed_by`` of each stage decide where W go; the run itself
    takes ``costs``."""
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
    """Run orders of ``few`` (default: all) microbatches, and add the busiest rank's work for each further one."""
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
    """Build the schedule; cached, because each candidate is timed both with messages and without."""
    return build_schedule(kind, *sizes, costs=costs)


def _picoseconds(seconds: Sequence[float]) -> tuple[int, ...]:
    return tuple(round(x * PICO) for x in seconds)


def _of_table(kind: str, sizes: Sizes) -> list[Numbers]:
    """Return ``numbered`` of the schedule; builds no actions, because a search times many schedules."""
    pp, count, vpp, _ = sizes
    table, half, orders = schedule_table(sizes), pp * vpp * count, []
    for rank in range(pp):
        forwards = [(c * pp + rank) * count + m for m, c in table]
        backwards = [half + ((vpp - 1 - c) * pp + rank) * count + m for m, c in table]
        orders.append(in_turn(forwards, backwards, num_warmup(kind, sizes, rank)))
    return orders


def _growth(orders: list[Numbers], ends: list[int], kind: str, sizes: Sizes, period: int) -> int | None:
    """Return λ, the time from one steady period to the next; None until ``_STEADY_PERIODS`` agree on all ranks."""
    size = 2 * period * sizes.vpp  # actions of a rank in a period
    growth: int | None = None
    for rank, order in enumerate(orders):
        warmup = num_warmup(kind, sizes, rank)
        steady = len(order) - 2 * warmup
        if steady < (_STEADY_PERIODS + 1) * size:
            return None
        end = warmup + steady // size * size
        for place in range(end - _STEADY_PERIODS * size, end):
            delay = ends[order[place]] - ends[order[place - size]]
            if growth is None:
                growth = delay
            elif delay != growth:
                return None
    return growth
