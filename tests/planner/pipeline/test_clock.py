"""The clock beside the rule itself, applied action by action until nothing changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.fold import LOOP, rank_of, stage_of
from planner.pipeline.actions import Action, needs
from planner.pipeline.clock import NEVER, Delays, end_times, numbered
from planner.pipeline.kinds import KINDS
from planner.pipeline.schedule import Schedule, build_schedule
from planner.pipeline.zero_bubble import StageCosts
from tests.tools.examples import examples

Event = tuple[str, int, int]


def by_the_rule(schedule: Schedule, costs: StageCosts, delays: Delays) -> dict[Event, float]:
    """Ends by (kind, microbatch, stage): in rounds over all ranks, with no order of its own."""
    ends: dict[Event, float] = {}
    of_kind = dict(zip("FBW", costs, strict=True))
    for _ in range(sum(map(len, schedule.orders))):
        for rank, order in enumerate(schedule.orders):
            free = 0.0
            for action in order:
                stage = stage_of(rank, action.chunk, schedule.pp, schedule.fold)
                event = (action.kind, action.microbatch, stage)
                before = needs(*event, schedule.num_stages)
                if any(need not in ends for need in before):
                    break
                arrived = [ends[need] + _message(need, event, delays) for need in before]
                ends[event] = free = max([free, *arrived]) + of_kind[action.kind][stage]
    return ends


def _message(need: Event, event: Event, delays: Delays) -> float:
    if need[0] != event[0] or need[2] == event[2]:
        return 0.0
    return delays.sent[need[2]] if event[0] == "F" else delays.returned[event[2]]


@examples(60)
@given(st.data(), st.sampled_from(sorted(KINDS)), st.integers(2, 4), st.integers(1, 6))
def test_every_action_ends_when_the_rule_says(data: st.DataObject, kind: str, pp: int, count: int) -> None:
    vpp = 2 if KINDS[kind].runs_chunks else 1
    times = st.lists(st.integers(0, 5).map(float), min_size=pp * vpp, max_size=pp * vpp)
    costs, delays = (
        StageCosts(*(data.draw(times) for _ in range(3))),
        Delays(data.draw(times)[1:], data.draw(times)[1:]),
    )
    schedule = build_schedule(kind, pp, count * pp, vpp)
    orders = numbered(schedule.orders, pp, pp * vpp, count * pp, schedule.fold)
    ends, expected = end_times(orders, costs, count * pp, delays), by_the_rule(schedule, costs, delays)
    for rank, (order, numbers) in enumerate(zip(schedule.orders, orders, strict=True)):
        for action, number in zip(order, numbers, strict=True):
            stage = stage_of(rank, action.chunk, pp, schedule.fold)
            assert ends[number] == expected[action.kind, action.microbatch, stage]


@pytest.mark.parametrize("late", ["own forward", "neighbour's forward"])
def test_what_waits_for_ever_never_ends(late: str) -> None:
    first = [Action("F", 0), Action("B", 0)]
    second = [*reversed(first)] if late == "own forward" else first
    orders = [first if late == "own forward" else [*reversed(first)], second]
    ends = end_times(numbered(map(tuple, orders), 2, 2, 1, LOOP), StageCosts([1] * 2, [1] * 2, [1] * 2), 1)
    assert ends.count(NEVER) == (5 if late == "own forward" else 6)
    assert [rank_of(stage, 2, LOOP) for stage in (0, 1)] == [0, 1]
