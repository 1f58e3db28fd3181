"""Two chunks a rank in a v: how long ranks wait and what they hold, by equal costs and by any, and wrong sizes."""

import pytest
from hypothesis import given

from passes.errors import PlanError
from planner.fold import V, rank_of
from planner.pipeline.actions import Action, too_early
from planner.pipeline.links import links, received_by
from planner.pipeline.schedule import CUSTOM, Schedule, build_schedule
from planner.pipeline.simulate import format_schedule, parse_schedule, simulate
from planner.pipeline.zero_bubble import StageCosts
from tests.tools.examples import examples
from tests.tools.schedules import costed_pipelines, forward_only, held

pytestmark = pytest.mark.check

KIND = "zero_bubble_v"


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_on_equal_stages_a_rank_waits_for_the_first_microbatch_alone(pp: int, times: int) -> None:
    count = times * pp
    schedule = build_schedule(KIND, pp, count, 2)
    run, work = simulate(schedule), 6 * count
    assert run.duration - work == pp - 1, "what the last rank waits for its first forward"
    assert simulate(build_schedule("zero_bubble", pp, count), StageCosts(*[[2] * pp] * 3)).duration - work == 2 * (
        pp - 1
    )
    assert simulate(
        build_schedule("1f1b", pp, count), StageCosts([2] * pp, [4] * pp, [0] * pp)
    ).duration - work == 6 * (pp - 1)
    assert max(held(schedule)) <= 2 * pp, "two chunks of each microbatch that 1f1b holds"
    assert max(run.peak_in_flight) <= 2 * pp


def test_orders_of_two_ranks() -> None:
    assert format_schedule(build_schedule(KIND, 2, 2, 2)).splitlines() == [
        "zero_bubble_v pp=2 vpp=2 microbatches=2 group=2",
        "0: F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 W0.1 B1.0 W1.1 W0.0 W1.0",
        "1: F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0 W0.1 W0.0 W1.1 W1.0",
    ]


@examples(80)
@given(costed_pipelines(2))
def test_by_any_costs_it_ends_and_holds_no_more(pipeline: tuple[int, int, StageCosts]) -> None:
    pp, count, costs = pipeline
    schedule = build_schedule(KIND, pp, count, 2, costs=costs)
    simulate(schedule, costs)
    assert max(held(schedule)) <= 2 * pp
    assert all(too_early(order) is None for order in schedule.orders)
    assert build_schedule(KIND, pp, count, 2, costs=costs) == schedule


@pytest.mark.parametrize("pp", [2, 4, 6])
@pytest.mark.parametrize("each", [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (2.0, 3.0, 2.0), (4.0, 5.0, 3.0)])
def test_other_costs_than_equal_ones_wait_no_longer_than_one_chunk_a_rank(pp: int, each: tuple[float, ...]) -> None:
    count = 3 * pp
    costs, whole = (StageCosts(*([times * cost] * n for cost in each)) for times, n in ((1, 2 * pp), (2, pp)))
    folded = simulate(build_schedule(KIND, pp, count, 2, costs=costs), costs)
    zero = simulate(build_schedule("zero_bubble", pp, count, costs=whole), whole)
    assert folded.duration <= zero.duration + 1e-4


def test_microbatches_stay_in_order_on_each_chunk() -> None:
    """So the messages of a link come in one order at both its ends."""
    for order in build_schedule(KIND, 4, 9, 2).orders:
        for kind in "FBW":
            for chunk in (0, 1):
                assert [a.microbatch for a in order if (a.kind, a.chunk) == (kind, chunk)] == list(range(9))


def test_a_v_has_links_between_neighbours_alone_and_none_at_its_turn() -> None:
    ends = {(link.sender, link.receiver) for link in links(4, 2, V)}
    assert ends == {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)}
    assert received_by("F", 4, 0).link(4, V) is None
    assert received_by("B", 3, 0).link(4, V) is None
    assert rank_of(7, 4, V) == 0


def test_a_list_by_hand_says_that_it_is_folded() -> None:
    built = build_schedule(KIND, 2, 3, 2)
    assert parse_schedule(format_schedule(built)) == built
    by_hand = Schedule(CUSTOM, 2, 2, 3, 2, built.orders, V)
    text = format_schedule(by_hand)
    assert text.startswith("custom pp=2 vpp=2 microbatches=3 group=2 fold=v\n")
    assert parse_schedule(text) == by_hand
    assert simulate(by_hand) == simulate(built)
    with pytest.raises(PlanError, match="deadlocks"):
        simulate(parse_schedule(text.replace(" fold=v", "")))
    assert parse_schedule(format_schedule(forward_only(built))).fold == V


def test_the_forwards_alone_end_too() -> None:
    alone = forward_only(build_schedule(KIND, 4, 6, 2))
    assert simulate(alone).peak_in_flight == (1, 1, 1, 1)


def test_no_w_is_left_out_or_early() -> None:
    built = build_schedule(KIND, 2, 2, 2)
    order = list(built.orders[0])
    without = tuple(a for a in order if a != Action("W", 0, 1))
    with pytest.raises(PlanError, match=r"misses W0\.1"):
        Schedule(KIND, 2, 2, 2, 2, (without, built.orders[1]), V)
    early = (Action("W", 0, 1), *without)
    with pytest.raises(PlanError, match=r"runs W0\.1 before B0\.1"):
        Schedule(KIND, 2, 2, 2, 2, (early, built.orders[1]), V)


@pytest.mark.parametrize(
    ("pp", "vpp", "what", "fix"),
    [
        (1, 1, "but pp = 1", "1f1b"),
        (2, 1, "but vpp = 1", "zero_bubble"),
        (2, 3, "but vpp = 3", "interleaved_1f1b"),
    ],
)
def test_sizes_that_make_no_v_are_refused(pp: int, vpp: int, what: str, fix: str) -> None:
    with pytest.raises(PlanError, match=what) as error:
        build_schedule(KIND, pp, 4, vpp)
    assert fix in (error.value.fix or "")
