"""Seconds of a pipeline: the action lists of planner.pipeline.schedule, run with the seconds of each stage.

    start(F m, s) = max(rank is free, end(F m, s−1) + message)        end = start + forward(s)
    start(B m, s) = max(rank is free, end(F m, s), end(B m, s+1) + message)        end = start + backward(s)

A run is exact, in integer picoseconds. Long ones need not be run to their end: the rule above only adds and takes
maxima, so once all actions of three periods (a microbatch of 1f1b, a group of interleaved_1f1b) in a row end later than
those of the period before by one and the same λ, on all ranks, the next ones do too: an action waits for others at most
two periods back. Then M microbatches take (M − M')/period · λ longer than M'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.pipeline.schedule import KINDS, num_warmup, schedule_table

PICO = 1e12
_ALIKE = 3  # periods in a row


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds: of the full run; the begin and the end of each rank's work."""

    seconds: float
    starts: tuple[float, ...]
    ends: tuple[float, ...]


def run_pipeline(
    kind: str,
    pp: int,
    vpp: int,
    num_microbatches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    sent: Sequence[float] = (),
    returned: Sequence[float] = (),
    group_size: int | None = None,
) -> Run:
    """``forward``, ``backward``: seconds of each stage; ``sent``, ``returned``: of the messages across each cut."""
    if pp == 1:
        total = num_microbatches * (sum(forward) + sum(backward))
        return Run(total, (0.0,), (total,))
    group = group_size or pp
    costs = tuple(round(x * PICO) for x in forward), tuple(round(x * PICO) for x in backward)
    none = [0.0] * (pp * vpp - 1)
    delays = tuple(round(x * PICO) for x in sent or none), tuple(round(x * PICO) for x in returned or none)
    period = group if vpp > 1 else 1
    few = num_microbatches
    if KINDS[kind].repeats:
        least = 2 * pp + 6 * period
        few = min(num_microbatches, least + (num_microbatches - least) % period)
    while True:
        orders = _orders(kind, pp, vpp, few, group)
        ends = _ends(orders, pp, vpp, few, costs, delays)
        more = 0
        if few < num_microbatches:
            grown = _growth(orders, ends, kind, pp, vpp, few, group, period)
            if grown is None:
                few = min(num_microbatches, 2 * few + (num_microbatches - 2 * few) % period)
                continue
            more = (num_microbatches - few) // period * grown
        done = [ends[order[-1]] + more for order in orders]
        starts = [ends[order[0]] - costs[0][rank] for rank, order in enumerate(orders)]
        return Run(max(done) / PICO, tuple(s / PICO for s in starts), tuple(e / PICO for e in done))


def _orders(kind: str, pp: int, vpp: int, count: int, group: int) -> list[list[int]]:
    """Of each rank its actions as numbers: forward of microbatch m on stage s is s·M + m, backward S·M + s·M + m."""
    table = schedule_table(count, vpp, group)
    stages, found = pp * vpp * count, []
    for rank in range(pp):
        forwards = [(c * pp + rank) * count + m for m, c in table]
        backwards = [stages + ((vpp - 1 - c) * pp + rank) * count + m for m, c in table]
        warmup = num_warmup(kind, pp, rank, len(table), vpp, group)
        order = forwards[:warmup]
        for pair in zip(forwards[warmup:], backwards, strict=False):
            order += pair
        found.append(order + backwards[len(table) - warmup :])
    return found


def _ends(
    orders: list[list[int]],
    pp: int,
    vpp: int,
    count: int,
    costs: tuple[Sequence[int], Sequence[int]],
    delays: tuple[Sequence[int], Sequence[int]],
) -> list[int]:
    """When each action ends. Ranks run as far as they can, in turn, until all are done."""
    num_stages = pp * vpp
    half, last = num_stages * count, num_stages - 1
    ends = [-1] * (2 * half)
    forward, backward = costs
    into = [0, *_crossing(delays[0], pp)]
    back = [*_crossing(delays[1], pp), 0]
    at, free, rank, idle = [0] * pp, [0] * pp, 0, 0
    lengths = [len(order) for order in orders]
    while idle < pp:
        order, position, now = orders[rank], at[rank], free[rank]
        first, length = position, lengths[rank]
        while position < length:
            action = order[position]
            if action < half:
                stage = action // count
                if stage:
                    need = ends[action - count]
                    if need < 0:
                        break
                    need += into[stage]
                    if need > now:
                        now = need
                now += forward[stage]
            else:
                stage = (action - half) // count
                if stage < last:
                    need = ends[action + count]
                    if need < 0:
                        break
                    need += back[stage]
                    if need > now:
                        now = need
                now += backward[stage]
            ends[action] = now
            position += 1
        idle = 0 if position > first else idle + 1
        at[rank], free[rank] = position, now
        rank = rank + 1 if rank + 1 < pp else 0
    return ends


def _crossing(delays: Sequence[int], pp: int) -> list[int]:
    """Chunks of one rank hand their values over without a message."""
    return [0 if pp == 1 else delay for delay in delays]


def _growth(
    orders: list[list[int]], ends: list[int], kind: str, pp: int, vpp: int, count: int, group: int, period: int
) -> int | None:
    """By how much each period ends later than the one before, if the last steady ones all agree; else None."""
    size = 2 * period * vpp  # actions of a period
    growth: int | None = None
    for rank, order in enumerate(orders):
        warmup = num_warmup(kind, pp, rank, count * vpp, vpp, group)
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
