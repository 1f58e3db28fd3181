"""The place of an action in its schedule: a window of the grid, with the action marked."""

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from planner.pipeline.schedule import Action, build_schedule
from planner.pipeline.simulate import MOST_RANKS, MOST_STEPS, grid_around, simulate
from tests.tools.examples import examples
from tests.tools.schedules import forward_only

pytestmark = pytest.mark.check


def test_a_short_schedule_is_shown_whole():
    orders = build_schedule("1f1b", 2, 3).orders
    assert_expected_inline(
        grid_around(orders, 1, Action("B", 1)),
        """\
step  rank0  rank1
0     F0.0   .
1     F1.0   F0.0
2     .      B0.0
3     B0.0   F1.0
4     F2.0   >B1.0<
5     B1.0   F2.0
6     .      B2.0
7     B2.0   .""",
    )


def test_of_a_long_one_what_is_next_to_the_place():
    orders = build_schedule("1f1b", 32, 64).orders
    text = grid_around(orders, 20, orders[20][70])
    lines = text.splitlines()
    assert len(lines) == 1 + MOST_STEPS
    assert lines[0].split() == ["step", *(f"rank{rank}" for rank in range(12, 28))]
    assert max(map(len, lines)) <= 6 + 9 * MOST_RANKS


@examples(40)
@given(st.integers(2, 20), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.data())
def test_the_marked_cell_is_the_action_at_its_step_and_rank(pp, vpp, groups, evaluates, data):
    schedule = build_schedule(None, pp, pp * groups, vpp)
    schedule = forward_only(schedule) if evaluates else schedule
    rank = data.draw(st.integers(0, pp - 1))
    action = data.draw(st.sampled_from(schedule.orders[rank]))
    head, *rows = [line.split() for line in grid_around(schedule.orders, rank, action).splitlines()]
    marked = [(int(row[0]), column) for row in rows for column, cell in enumerate(row) if cell.startswith(">")]
    ((step, column),) = marked
    assert head[column] == f"rank{rank}"
    assert simulate(schedule).steps[step][rank] == action
    assert f">{action}<" in rows[step - int(rows[0][0])]
