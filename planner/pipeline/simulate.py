"""Run a schedule before anything runs: does it end, how much of it is bubble, how much does a rank hold.

    a forward of stage s waits for that microbatch's forward of stage s - 1
    a backward of stage s waits for its own forward and that microbatch's backward of stage s + 1
    the gradients of weights wait for their backward
    bubble = 1 - (time that the ranks work) / (pp · time from first start to last end)

The clock (``planner.pipeline.clock``) runs it twice. Once in lock step (every action takes one step): that gives the
grid of steps and ranks and finds deadlocks. The messages of each link must have one order at both its ends
(``planner.pipeline.links``). Then with costs, which gives start and end of every action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.errors import PlanError
from planner.fold import chunk_of, rank_of, stage_of
from planner.pipeline.actions import Action, Order, needs
from planner.pipeline.clock import NEVER, end_times, needed, numbered
from planner.pipeline.links import check_links
from planner.pipeline.schedule import Schedule, SchedulePlan
from planner.pipeline.zero_bubble import StageCosts

Steps = tuple[tuple[Action | None, ...], ...]
Span = tuple[float, float]
_Event = tuple[str, int, int]  # kind, microbatch, stage

_SHOWN_STEPS = 24


@dataclass(frozen=True, slots=True)
class Simulation:
    """The simulated run of a schedule. ``steps[t][rank]`` is the action at lock step t, None if the rank waits."""

    steps: Steps
    spans: tuple[tuple[Span, ...], ...]  # per rank, start and end of each of its actions, in units of the costs
    duration: float
    bubble_fraction: float
    peak_in_flight: tuple[int, ...]  # per rank, the most (microbatch, chunk) pairs between their forward and backward
    peak_waiting: tuple[int, ...] = ()  # per rank, the most between backward and W; empty without W

    def grid(self) -> str:
        return format_grid(self.steps)


def simulate(
    schedule: Schedule,
    forward_cost: float | Sequence[float] = 1.0,
    backward_cost: float | Sequence[float] | None = None,
    weights_cost: float | Sequence[float] = 1.0,
) -> Simulation:
    """Run ``schedule``; a cost is one number or a number for each stage, in any unit of time.

    ``backward_cost``: of a full backward if the schedule has no W, else of a B; both together two
    forwards if not given. Raises PlanError when ranks wait for each other forever (it shows the grid and the action for
    which each rank waits), and when two ranks have a link's messages in different orders.
    """
    steps = _lock_steps(schedule)
    check_links(schedule)
    if backward_cost is None:
        backward_cost = 1.0 if schedule.has_weights else 2.0
    spans = _spans(
        schedule, StageCosts(*(_per_stage(x, schedule) for x in (forward_cost, backward_cost, weights_cost)))
    )
    duration = max(end for rank in spans for _, end in rank)
    busy = sum(end - start for rank in spans for start, end in rank)
    bubble = 1.0 - busy / (schedule.pp * duration) if duration else 0.0
    in_flight = tuple(_most_between(order, "F", "B") for order in schedule.orders)
    waiting = tuple(_most_between(order, "B", "W") for order in schedule.orders) if schedule.has_weights else ()
    return Simulation(steps, spans, duration, bubble, in_flight, waiting)


def planned(schedule: Schedule, costs: StageCosts | None = None) -> SchedulePlan:
    """The plan's row of a schedule, run before anything runs. Raises PlanError if it would never end.

    ``costs``: by which its W were put; its bubble is that of these.
    """
    run = simulate(schedule) if costs is None else simulate(schedule, *costs)
    orders = tuple(tuple((a.kind, a.microbatch, a.chunk) for a in order) for order in schedule.orders)
    count = schedule.num_microbatches
    return SchedulePlan(schedule.kind, count, orders, run.bubble_fraction, run.peak_in_flight, run.peak_waiting)


def format_grid(steps: Steps, first: int = 0, first_rank: int = 0, marked: tuple[int, int] | None = None) -> str:
    """A row for each step, a column for each rank; ``.`` for a rank that waits.

    ``first`` and ``first_rank`` number the first row and column; ``marked``: a place of ``steps`` that is pointed at.
    """
    if not steps:
        return "step  (nothing ran)"
    cells = [[str(action) if action else "." for action in row] for row in steps]
    if marked is not None:
        cells[marked[0]][marked[1]] = f">{cells[marked[0]][marked[1]]}<"
    width = max(6, *(len(cell) + 1 for row in cells for cell in row if cell != "."))
    head = "step  " + "".join(f"rank{rank}".ljust(width) for rank in range(first_rank, first_rank + len(steps[0])))
    rows = [f"{step:<6}" + "".join(cell.ljust(width) for cell in row) for step, row in enumerate(cells, first)]
    return "\n".join(line.rstrip() for line in [head, *rows])


def _lock_steps(schedule: Schedule) -> Steps:
    """Every action takes one step."""
    ones = [1] * schedule.num_stages
    spans = _spans(schedule, StageCosts(ones, ones, ones))
    steps = [[None] * schedule.pp for _ in range(max((round(end) for rank in spans for _, end in rank), default=0))]
    for rank, (order, of_rank) in enumerate(zip(schedule.orders, spans, strict=True)):
        for action, (start, _) in zip(order, of_rank, strict=False):
            steps[round(start)][rank] = action  # pyright: ignore
    found = tuple(map(tuple, steps))
    if any(len(of_rank) < len(order) for order, of_rank in zip(schedule.orders, spans, strict=True)):
        raise _deadlock(schedule, found, [len(of_rank) for of_rank in spans])
    return found


def _deadlock(schedule: Schedule, steps: Steps, position: list[int]) -> PlanError:
    first = max(0, len(steps) - _SHOWN_STEPS)
    ran = {_event(a, rank, schedule) for row in steps for rank, a in enumerate(row) if a is not None}
    waits = [
        f"  rank {rank}: {order[at]} waits for {_missing(schedule, order[at], rank, ran)}"
        for rank, (order, at) in enumerate(zip(schedule.orders, position, strict=True))
        if at < len(order)
    ]
    grid = "\n".join(f"  {line}" for line in format_grid(steps[first:], first).splitlines())
    return PlanError(
        f"schedule {schedule.kind} (pp = {schedule.pp}, vpp = {schedule.vpp}, {schedule.num_microbatches} "
        f"microbatches) deadlocks at step {len(steps)}\n{grid}\n" + "\n".join(waits),
        where="pipeline.schedule",
        fix="in the lists of their ranks, move the awaited actions before the waiting ones",
    )


def _event(action: Action, rank: int, schedule: Schedule) -> _Event:
    return action.kind, action.microbatch, stage_of(rank, action.chunk, schedule.pp, schedule.fold)


def _missing(schedule: Schedule, action: Action, rank: int, ran: set[_Event]) -> str:
    before = needs(*_event(action, rank, schedule), schedule.num_stages)
    kind, microbatch, stage = next(need for need in before if need not in ran)
    chunk, rank = (of(stage, schedule.pp, schedule.fold) for of in (chunk_of, rank_of))
    return f"{Action(kind, microbatch, chunk)} of rank {rank}"


def _per_stage(cost: float | Sequence[float], schedule: Schedule) -> list[float]:
    costs = list(map(float, cost)) if isinstance(cost, Sequence) else [float(cost)] * schedule.num_stages
    assert len(costs) == schedule.num_stages, f"{len(costs)} costs for {schedule.num_stages} stages"
    return costs


def _spans(schedule: Schedule, costs: StageCosts) -> tuple[tuple[Span, ...], ...]:
    """Start and end of each action that runs: it starts when its rank is free and everything needed has ended."""
    count, num_stages, found = schedule.num_microbatches, schedule.num_stages, list[tuple[Span, ...]]()
    orders = numbered(schedule.orders, schedule.pp, num_stages, count, schedule.fold)
    ends = end_times(orders, costs, count)
    for order in orders:
        spans, free = list[Span](), 0.0
        for action in order:
            if ends[action] == NEVER:
                break
            start = max([free, *(ends[need] for need in needed(action, num_stages, count))])
            free = ends[action]
            spans.append((start, free))
        found.append(tuple(spans))
    return tuple(found)


def _most_between(order: Order, begin: str, end: str) -> int:
    """The most pairs of microbatch and chunk between two kinds of actions. Without backwards nothing is kept: one."""
    if all(action.kind == "F" for action in order):
        return 1
    between = peak = 0
    for action in order:
        between += (action.kind == begin) - (action.kind == end)
        peak = max(peak, between)
    return peak
