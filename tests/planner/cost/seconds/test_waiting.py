"""The run of a pipeline with W beside planner.pipeline.simulate; and what a W is priced at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.pipeline.clock import Delays, run_waiting
from planner.pipeline.kinds import Sizes
from planner.pipeline.schedule import build_schedule
from planner.pipeline.simulate import simulate
from planner.pipeline.zero_bubble import StageCosts
from tests.tools.examples import examples

costs = st.integers(1, 6).map(float)


@st.composite
def stages(draw: st.DrawFn, pp: int) -> StageCosts:
    return StageCosts(*(draw(st.lists(costs, min_size=pp, max_size=pp)) for _ in range(3)))


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
