"""Simulate a schedule: check that it completes, and measure its bubble and the microbatches in flight on each rank.

    bubble = 1 - (time that the ranks work) / (pp · time from first start to last end)

The clock (``planner.pipeline.clock``) runs the schedule twice: in lock step, where every action takes one step, for
the grid and for deadlocks; then with costs, for the start and end of each action. Both ends of each link must have the
same order of messages (``planner.pipeline.links``).

The text of a schedule has a head line, then a line per rank. A head that ends in ``fold=v`` means that chunks run down
the ranks and back:

    1f1b pp=2 vpp=1 microbatches=2 group=2
    0: F0.0 F1.0 B0.0 B1.0
    1: F0.0 B0.0 F1.0 B1.0
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from passes.errors import PlanError, SpecError, Where
from planner.fold import LOOP, Fold, rank_of, stage_of
from planner.pipeline.actions import Action, Order, format_order, has_weights, needs, without_weights
from planner.pipeline.clock import KINDS_OF_ACTIONS, NEVER, end_times, numbered
from planner.pipeline.kinds import KINDS, unknown_kind
from planner.pipeline.links import check_links
from planner.pipeline.schedule import CUSTOM, FORWARD_ONLY, OrderError, Schedule, SchedulePlan, build_schedule, fold_of
from planner.pipeline.zero_bubble import StageCosts

Steps = tuple[tuple[Action | None, ...], ...]
Span = tuple[float, float]
_Event = tuple[str, int, int]  # kind, microbatch, stage

_SHOWN_STEPS, _SHOWN_CHARACTERS = 24, 60


@dataclass(frozen=True, slots=True)
class Simulation:
    """The simulated run of a schedule. ``steps[t][rank]`` is the action at lock step t, None while the rank idles."""

    steps: Steps
    spans: tuple[tuple[Span, ...], ...]  # per rank, start and end of each action, in units of the costs
    duration: float
    bubble_fraction: float
    peak_in_flight: tuple[int, ...]  # per rank, the most (microbatch, chunk) pairs between their forward and backward
    peak_waiting: tuple[int, ...] = ()  # per rank, the most between backward and W; empty without W

    def grid(self) -> str:
        return format_grid(self.steps)


def simulate(schedule: Schedule, costs: StageCosts | None = None) -> Simulation:
    """Simulate ``schedule`` with the ``costs`` of its stages: of full backwards if it has no W. By default all actions
    cost the same, and a full backward costs two forwards.

    Raises PlanError for a deadlock (with the grid, and the action that each rank waits for), and if two ranks have the
    messages of a link in different orders.
    """
    steps = _lock_steps(schedule)
    check_links(schedule)
    equal = StageCosts.equal(schedule.num_stages)
    full = equal if schedule.has_weights else equal._replace(backward=[2.0] * schedule.num_stages)
    spans = _spans(schedule, costs or full)
    duration = max(end for rank in spans for _, end in rank)
    busy = sum(end - start for rank in spans for start, end in rank)
    bubble = 1.0 - busy / (schedule.pp * duration) if duration else 0.0
    in_flight = tuple(_most_between(order, "F", "B") for order in schedule.orders)
    waiting = tuple(_most_between(order, "B", "W") for order in schedule.orders) if schedule.has_weights else ()
    return Simulation(steps, spans, duration, bubble, in_flight, waiting)


def planned(schedule: Schedule, costs: StageCosts | None = None) -> SchedulePlan:
    """Simulate ``schedule`` and return it for the plan. Raises PlanError if it would deadlock.

    ``costs``: those that decided the places of its W; they give the bubble.
    """
    run = simulate(schedule, costs)
    plan = schedule.kind, schedule.num_microbatches, schedule.orders
    return SchedulePlan(*plan, run.bubble_fraction, run.peak_in_flight, run.peak_waiting)


def format_grid(steps: Steps, first: int = 0, first_rank: int = 0, marked: tuple[int, int] | None = None) -> str:
    """Return a grid with a row per step and a column per rank; ``.`` where a rank idles.

    ``first`` and ``first_rank`` number the first row and column; ``marked``: (row, column) of a highlighted cell.
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
    ones = [1] * schedule.num_stages
    spans = _spans(schedule, StageCosts(ones, ones, ones))
    steps = [[None] * schedule.pp for _ in range(max((round(end) for rank in spans for _, end in rank), default=0))]
    for rank, (order, of_rank) in enumerate(zip(schedule.orders, spans, strict=True)):
        for action, (start, _) in zip(order, of_rank, strict=False):
            steps[round(start)][rank] = action  # pyright: ignore
    frozen = tuple(map(tuple, steps))
    if any(len(of_rank) < len(order) for order, of_rank in zip(schedule.orders, spans, strict=True)):
        raise _deadlock(schedule, frozen, [len(of_rank) for of_rank in spans])
    return frozen


def _deadlock(schedule: Schedule, steps: Steps, position: list[int]) -> OrderError:
    first = max(0, len(steps) - _SHOWN_STEPS)
    ran = {_event(a, rank, schedule) for row in steps for rank, a in enumerate(row) if a is not None}
    waits = [
        f"  rank {rank}: {order[at]} waits for {_missing(schedule, order[at], rank, ran)}"
        for rank, (order, at) in enumerate(zip(schedule.orders, position, strict=True))
        if at < len(order)
    ]
    grid = "\n".join(f"  {line}" for line in format_grid(steps[first:], first).splitlines())
    waiting = next(rank for rank, order in enumerate(schedule.orders) if position[rank] < len(order))
    return OrderError(
        f"schedule {schedule.kind} (pp = {schedule.pp}, vpp = {schedule.vpp}, {schedule.num_microbatches} "
        f"microbatches) deadlocks at step {len(steps)}\n{grid}\n" + "\n".join(waits),
        rank=waiting,
        where="pipeline.schedule",
        fix="in the lists of their ranks, move the awaited actions before the waiting ones",
    )


def _event(action: Action, rank: int, schedule: Schedule) -> _Event:
    return action.kind, action.microbatch, stage_of(rank, action.chunk, schedule.pp, schedule.fold)


def _missing(schedule: Schedule, action: Action, rank: int, ran: set[_Event]) -> str:
    before = needs(*_event(action, rank, schedule), schedule.num_stages)
    kind, microbatch, stage = next(need for need in before if need not in ran)
    action = Action(kind, microbatch, stage // schedule.pp)
    return f"{action} of rank {rank_of(stage, schedule.pp, schedule.fold)}"


def _spans(schedule: Schedule, costs: StageCosts) -> tuple[tuple[Span, ...], ...]:
    """Return start and end of each action up to a deadlock: it starts once its rank and its dependencies are done."""
    count, num_stages, of_ranks = schedule.num_microbatches, schedule.num_stages, list[tuple[Span, ...]]()
    ends = end_times(numbered(schedule.orders, schedule.pp, num_stages, count, schedule.fold), costs, count)

    def end(kind: str, microbatch: int, stage: int) -> float:
        return ends[(KINDS_OF_ACTIONS.index(kind) * num_stages + stage) * count + microbatch]

    for rank, order in enumerate(schedule.orders):
        spans, free = list[Span](), 0.0
        for event in (_event(action, rank, schedule) for action in order):
            if end(*event) == NEVER:
                break
            start, free = max([free, *(end(*need) for need in needs(*event, num_stages))]), end(*event)
            spans.append((start, free))
        of_ranks.append(tuple(spans))
    return tuple(of_ranks)


def _most_between(order: Order, begin: str, end: str) -> int:
    """Return the most (microbatch, chunk) pairs between two kinds of actions; 1 if the order has only forwards."""
    if all(action.kind == "F" for action in order):
        return 1
    between = peak = 0
    for action in order:
        between += (action.kind == begin) - (action.kind == end)
        peak = max(peak, between)
    return peak


MOST_STEPS, MOST_RANKS = 20, 16


def grid_around(orders: Sequence[Order], rank: int, action: Action, fold: Fold = LOOP) -> str:
    """Return the lock-step grid around ``action`` of ``rank``, with that action marked."""
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
    return max(0, min(place - most // 2, count - most))


_ACTION = re.compile(r"([FBW])(\d{1,9})\.(\d{1,9})")
_SIZE = r"([1-9]\d{0,8})"
_HEAD = re.compile(rf"(\w+) pp={_SIZE} vpp={_SIZE} microbatches={_SIZE}(?: group={_SIZE})?(?: fold=(loop|v))?")


def format_schedule(schedule: Schedule) -> str:
    """Return the text of a schedule, which ``parse_schedule`` reads: a head line, then a line for each rank."""
    s = schedule
    head = f"{s.kind} pp={s.pp} vpp={s.vpp} microbatches={s.num_microbatches} group={s.group_size}"
    head += "" if s.fold == fold_of(s.kind) else f" fold={s.fold}"
    lines = [f"{rank}: {format_order(order)}" for rank, order in enumerate(s.orders)]
    return "\n".join([head, *lines]) + "\n"


def parse_order(text: str, rank: int = 0) -> Order:
    """Parse the text of ``format_order`` for ``rank``. Raises PlanError at the first word that is not an action."""
    return tuple(_parse_action(word, rank) for word in text.split())


def schedule_by_hand(text: str, at: Where) -> Schedule:
    """Parse and simulate a schedule written by hand, of kind ``custom``. ``at``: the file or spec key with ``text``.

    Raises SpecError with the line of the rank that cannot run, or the head line.
    """
    try:
        schedule = replace(parse_schedule(text), kind=CUSTOM)
        simulate(schedule)
    except PlanError as error:
        numbered_lines = _lines(text) or [(1, "")]
        line, code = numbered_lines[error.rank + 1 if isinstance(error, OrderError) else 0]
        where = replace(at, line=at.line or line, code=code[:_SHOWN_CHARACTERS])
        raise SpecError(error.what, where=where, fix=error.fix) from None
    return schedule


def parse_schedule(text: str) -> Schedule:
    """Parse the text of a schedule. The kind becomes ``custom`` if the orders differ from those of the stated kind.

    The places of W, and other choices by cost, are not compared, because the text has no costs.

    Raises PlanError if the text is not a schedule, or an action is missing or repeated.
    """
    head, *lines = [line for _, line in _lines(text)] or [""]
    match = _HEAD.fullmatch(head)
    if not match:
        raise PlanError(
            f"schedule text begins with `{head}`, not with its sizes",
            fix="begin with a line like `1f1b pp=2 vpp=1 microbatches=4 group=2`",
        )
    kind, (pp, vpp, num_microbatches, group_size) = match[1], (int(n or match[2]) for n in match.groups()[1:5])
    orders = tuple(parse_order(_strip_rank(line, rank), rank) for rank, line in enumerate(lines))
    if kind in KINDS:
        built = build_schedule(kind, pp, num_microbatches, vpp, group_size)
        alike = KINDS[kind].orders is not None
        alike = alike or tuple(map(without_weights, orders)) == tuple(map(without_weights, built.orders))
        kind = kind if alike and has_weights(orders) == built.has_weights else CUSTOM
    elif kind not in (CUSTOM, FORWARD_ONLY):
        raise unknown_kind(kind)
    fold = cast(Fold, match[6] or fold_of(match[1]))
    return Schedule(kind, pp, vpp, num_microbatches, group_size, orders, fold)


def _lines(text: str) -> list[tuple[int, str]]:
    """Return (line number, line) of each line that is not empty without its ``#`` comment."""
    stripped = ((number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in stripped if line]


def _strip_rank(line: str, rank: int) -> str:
    name, colon, actions = line.partition(":")
    if not colon or name.strip() != str(rank):
        what = f"schedule text: the line of pp rank {rank} begins with `{line[:20]}`"
        raise OrderError(what, rank=rank, fix=f"begin it with `{rank}:`")
    return actions


def _parse_action(word: str, rank: int) -> Action:
    match = _ACTION.fullmatch(word)
    if not match:
        fix = "write F, B or W, the microbatch, a dot, the chunk: F3.0"
        raise OrderError(f"schedule text: `{word[:_SHOWN_CHARACTERS]}` is not an action", rank=rank, fix=fix)
    return Action(match[1], int(match[2]), int(match[3]))
