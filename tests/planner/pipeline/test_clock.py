"""The clock beside the rule itself, and its fast runs of a pipeline beside planner.pipeline.simulate, also with W."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.fold import LOOP, rank_of, stage_of
from planner.pipeline.actions import Action, needs
from planner.pipeline.clock import NEVER, Delays, end_times, numbered, run_table, run_waiting
from planner.pipeline.kinds import KINDS, Sizes
from planner.pipeline.schedule import Schedule, build_schedule
from planner.pipeline.simulate import simulate
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


# ---- the fast run of a pipeline beside planner.pipeline.simulate, also with W; its bounds, and the price of a W


costs = st.integers(1, 5)


def both(kind: str, pp: int, vpp: int, count: int, forward: list[int], backward: list[int]) -> tuple[float, float]:
    of = StageCosts(list(map(float, forward)), list(map(float, backward)), [])
    run = run_table(kind, Sizes(pp, count, vpp, pp), of)
    return run.seconds, simulate(build_schedule(kind, pp, count, vpp), of).duration


@examples(60)
@given(st.data(), st.integers(1, 5), st.integers(1, 40))
def test_1f1b_takes_what_the_simulation_takes(data: st.DataObject, pp: int, count: int) -> None:
    forward = data.draw(st.lists(costs, min_size=pp, max_size=pp))
    backward = data.draw(st.lists(costs, min_size=pp, max_size=pp))
    fast, slow = both("1f1b", pp, 1, count, forward, backward)
    assert fast == pytest.approx(slow, rel=1e-12)


@examples(30)
@given(st.data(), st.integers(2, 4), st.integers(2, 3), st.integers(1, 14))
def test_interleaved_takes_what_the_simulation_takes(data: st.DataObject, pp: int, vpp: int, groups: int) -> None:
    forward = data.draw(st.lists(costs, min_size=pp * vpp, max_size=pp * vpp))
    backward = data.draw(st.lists(costs, min_size=pp * vpp, max_size=pp * vpp))
    fast, slow = both("interleaved_1f1b", pp, vpp, pp * groups, forward, backward)
    assert fast == pytest.approx(slow, rel=1e-12)


def test_gpipe_takes_what_the_simulation_takes() -> None:
    fast, slow = both("gpipe", 3, 1, 5, [1, 3, 2], [2, 2, 5])
    assert fast == pytest.approx(slow, rel=1e-12)


@pytest.mark.parametrize("count", [12, 100, 101, 500])
def test_a_long_run_is_not_run_to_its_end_and_takes_as_long(count: int) -> None:
    stages = [1.0, 1.25, 1.0, 1.5]
    run = run_table("1f1b", Sizes(4, count, 1, 4), StageCosts(stages, stages, []))
    slow = simulate(build_schedule("1f1b", 4, count), StageCosts(stages, stages, []))
    assert run.seconds == pytest.approx(slow.duration, rel=1e-12)
    assert run.ends == pytest.approx([rank[-1][1] for rank in slow.spans], rel=1e-12)
    assert run.starts == pytest.approx([rank[0][0] for rank in slow.spans], rel=1e-12)


def test_messages_delay_and_the_first_stage_is_not_delayed() -> None:
    sizes, costs = Sizes(2, 1, 1, 2), StageCosts([1.0, 1.0], [2.0, 2.0], [])
    alone = run_table("1f1b", sizes, costs)
    later = run_table("1f1b", sizes, costs, Delays([0.25], [0.5]))
    assert alone.seconds == pytest.approx(6.0)
    assert later.seconds == pytest.approx(6.75)
    assert later.starts == pytest.approx((0.0, 1.25))


# ---- The run of a pipeline with W beside planner.pipeline.simulate; and what a W is priced at


fractions = st.integers(1, 6).map(float)


@st.composite
def stages(draw: st.DrawFn, pp: int) -> StageCosts:
    return StageCosts(*(draw(st.lists(fractions, min_size=pp, max_size=pp)) for _ in range(3)))


@examples(60)
@given(st.data(), st.integers(2, 5), st.integers(1, 20))
def test_it_takes_what_the_simulation_takes(data: st.DataObject, pp: int, count: int) -> None:
    of = data.draw(stages(pp))
    run = run_waiting("zero_bubble", Sizes(pp, min(count, 4 * pp), 1, pp), of, of)
    schedule = build_schedule("zero_bubble", pp, min(count, 4 * pp), costs=of)
    assert run.seconds == pytest.approx(simulate(schedule, of).duration, rel=1e-12)


@examples(40)
@given(st.data(), st.integers(2, 4), st.integers(2, 30))
def test_of_many_microbatches_it_takes_about_as_long_and_never_less_than_a_rank_works(
    data: st.DataObject, pp: int, more: int
) -> None:
    of, count = data.draw(stages(pp)), 4 * pp + more
    run = run_waiting("zero_bubble", Sizes(pp, count, 1, pp), of, of)
    whole = simulate(build_schedule("zero_bubble", pp, count, costs=of), of).duration
    assert run.seconds == pytest.approx(whole, rel=0.05)
    assert run.seconds >= count * max(map(sum, zip(*of, strict=True)))


def test_messages_make_it_longer_and_move_no_w() -> None:
    of = StageCosts([1.0] * 4, [1.0] * 4, [1.0] * 4)
    sizes = Sizes(4, 8, 1, 4)
    assert run_waiting("zero_bubble", sizes, of, of).seconds == 27
    later = run_waiting("zero_bubble", sizes, of, of, Delays([0.25] * 3, [0.5] * 3))
    assert later.seconds > 27
    assert later.starts == (0.0, 1.25, 2.5, 3.75)
