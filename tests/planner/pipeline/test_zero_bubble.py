"""Gradients of weights as actions: where zero_bubble puts them, what it gains and holds, and wrong lists by hand."""

import random

import pytest
from hypothesis import given

from passes.errors import PlanError
from planner.pipeline.actions import Action, too_early, without_weights
from planner.pipeline.kinds import MOST_ACTIONS
from planner.pipeline.links import RankMessages, carried, received_by, sent_by
from planner.pipeline.message_slots import order_by_microbatch
from planner.pipeline.schedule import Schedule, SchedulePlan, build_schedule
from planner.pipeline.simulate import format_schedule, parse_order, parse_schedule, planned, simulate
from planner.pipeline.zero_bubble import StageCosts
from planner.report.schedule import schedule_text, schedule_to_dict
from tests.tools.examples import examples
from tests.tools.schedules import costed_pipelines, forward_only, graph_slots, held

pytestmark = pytest.mark.check


def idle(schedule: Schedule, costs: StageCosts) -> float:
    """Time that the slowest rank does not work, of a zero_bubble or another schedule of the same work."""
    forward, backward, weights = costs
    whole = [b + w for b, w in zip(backward, weights, strict=True)]
    run = simulate(schedule, costs if schedule.has_weights else costs._replace(backward=whole))
    return run.duration - schedule.num_microbatches * max(f + b for f, b in zip(forward, whole, strict=True))


def test_on_equal_stages_it_waits_a_third_of_1f1b():
    one, zero = (simulate(build_schedule(kind, 4, 8)) for kind in ("1f1b", "zero_bubble"))
    assert (one.duration - 24, zero.duration - 24) == (9, 3)
    assert zero.bubble_fraction == pytest.approx(3 / 27)
    assert zero.peak_in_flight == one.peak_in_flight == (4, 3, 2, 1)
    assert zero.peak_waiting == (1, 2, 3, 4)
    assert one.peak_waiting == ()


def test_orders_of_two_ranks():
    schedule = build_schedule("zero_bubble", 2, 3)
    assert format_schedule(schedule).splitlines() == [
        "zero_bubble pp=2 vpp=1 microbatches=3 group=2",
        "0: F0.0 F1.0 B0.0 W0.0 F2.0 B1.0 W1.0 B2.0 W2.0",
        "1: F0.0 B0.0 F1.0 B1.0 W0.0 F2.0 B2.0 W1.0 W2.0",
    ]


@pytest.mark.parametrize("pp", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("costs", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.6), (2.0, 2.0, 1.0), (1.0, 2.0, 1.0)])
def test_equal_stages_wait_as_long_as_in_the_paper(pp, costs):
    """(pp − 1)·(F + B − W), where W is no longer than the others and microbatches fill the pipeline."""
    forward, backward, weights = costs
    given = StageCosts(*([cost] * pp for cost in costs))
    schedule = build_schedule("zero_bubble", pp, 2 * pp, costs=given)
    assert idle(schedule, given) == pytest.approx((pp - 1) * (forward + backward - weights), abs=1e-4)


@examples(120)
@given(costed_pipelines(1))
def test_by_any_costs_it_ends_holds_what_1f1b_holds_and_waits_no_longer(pipeline):
    pp, num_microbatches, costs = pipeline
    schedule, one = (build_schedule(k, pp, num_microbatches, costs=costs) for k in ("zero_bubble", "1f1b"))
    assert tuple(map(without_weights, schedule.orders)) == one.orders
    assert all(most <= held(one)[0] for most in held(schedule))
    assert idle(schedule, costs) <= idle(one, costs) + 1e-3
    assert build_schedule("zero_bubble", pp, num_microbatches, costs=costs) == schedule


def test_slower_stages_get_other_orders():
    even = build_schedule("zero_bubble", 4, 8)
    slow = StageCosts([1, 1, 1, 2], [1, 1, 1, 2], [1, 1, 1, 2])
    schedule = build_schedule("zero_bubble", 4, 8, costs=slow)
    assert schedule.orders != even.orders
    assert idle(schedule, slow) <= idle(even, slow)
    assert idle(schedule, slow) < idle(build_schedule("1f1b", 4, 8), slow)


def test_digits_far_behind_the_point_decide_nothing():
    rng, pp = random.Random(0), 4
    costs = StageCosts(*([1.0 + rng.random() * 1e-9 for _ in range(pp)] for _ in range(3)))
    assert build_schedule("zero_bubble", pp, 8, costs=costs) == build_schedule("zero_bubble", pp, 8)


def test_one_rank_alone_has_nothing_to_fill():
    with pytest.raises(PlanError, match="with pp = 1 no rank idles") as error:
        build_schedule("zero_bubble", 1, 8)
    assert "1f1b" in (error.value.fix or "")


def test_chunks_are_refused():
    with pytest.raises(PlanError, match="zero_bubble runs one chunk per rank, but vpp = 2"):
        build_schedule("zero_bubble", 2, 4, 2)


def test_a_step_with_more_actions_than_allowed_is_refused():
    with pytest.raises(PlanError, match="more than"):
        build_schedule("zero_bubble", 8, MOST_ACTIONS // 24 + 1)
    build_schedule("1f1b", 8, MOST_ACTIONS // 24 + 1)


HEAD = "custom pp=1 vpp=1 microbatches=2 group=1\n0: "


def test_by_hand_a_w_before_its_b_names_rank_and_action():
    with pytest.raises(PlanError) as error:
        parse_schedule(HEAD + "F0.0 F1.0 B0.0 W1.0 B1.0 W0.0")
    assert error.value.what == ("schedule: pp rank 0 runs W1.0 before B1.0, on which it depends: F1.0 B0.0 W1.0")
    assert error.value.fix == "put W1.0 after B1.0 in the list of rank 0"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("F0.0 F1.0 B0.0 W0.0 B1.0", "pp rank 0 misses W1.0"),
        ("F0.0 F1.0 B0.0 W0.0 W0.0 B1.0 W1.0", "pp rank 0 repeats W0.0"),
        ("F0.0 F1.0 B0.0 W0.0 B1.0 W1.0 W2.0", "pp rank 0 has no place for W2.0"),
    ],
)
def test_by_hand_w_of_all_backwards_or_of_none(text, what):
    with pytest.raises(PlanError) as error:
        parse_schedule(HEAD + text)
    assert what in error.value.what


def test_by_hand_w_in_any_order_behind_their_b():
    schedule = parse_schedule(HEAD + "F0.0 F1.0 B1.0 B0.0 W0.0 W1.0")
    assert schedule.has_weights
    assert simulate(schedule).duration == 6


def test_w_on_one_rank_alone_is_refused():
    text = "custom pp=2 vpp=1 microbatches=1 group=2\n0: F0.0 B0.0 W0.0\n1: F0.0 B0.0\n"
    with pytest.raises(PlanError, match=r"pp rank 1 misses W0\.0"):
        parse_schedule(text)


@pytest.mark.parametrize(
    ("orders", "what"),
    [
        ("F0.0 W0.0 B0.0", r"runs W0\.0 before its backward"),
        ("F0.0 B0.0 F1.0 B1.0 W0.0 W0.0", "lacks a W"),
        ("F0.0 B0.0 F1.0 B1.0 W0.0", "each forward and its backward once"),
    ],
)
def test_a_saved_plan_is_held_to_it_too(orders, what):
    with pytest.raises(PlanError, match=what):
        SchedulePlan("custom", 2, (parse_order(orders),))


def test_text_with_w_elsewhere_is_still_the_kind():
    schedule = build_schedule("zero_bubble", 2, 4, costs=StageCosts([1, 3], [1, 3], [1, 1]))
    assert parse_schedule(format_schedule(schedule)) == schedule
    head, *lines = format_schedule(build_schedule("1f1b", 2, 4)).splitlines()
    assert parse_schedule("\n".join([head.replace("1f1b", "zero_bubble"), *lines])).kind == "custom"


def test_links_and_graphs_do_not_know_of_w():
    zero, one = (build_schedule(kind, 4, 8) for kind in ("zero_bubble", "1f1b"))
    for rank, (order, bare) in enumerate(zip(zero.orders, one.orders, strict=True)):
        for by in (sent_by, received_by):
            found = [carried(RankMessages(s.orders, rank, 4, s.fold), by) for s in (zero, one)]
            assert found[0] == found[1]
        assert graph_slots(order, [3]) == graph_slots(bare, [3])
        assert order_by_microbatch(order) == order_by_microbatch(bare)


def test_evaluation_runs_forwards_alone():
    assert {a.kind for order in forward_only(build_schedule("zero_bubble", 4, 8)).orders for a in order} == {"F"}


def test_the_row_of_a_plan_has_what_waits():
    row = planned(build_schedule("zero_bubble", 4, 8))
    assert row.has_weights
    assert (row.peak_in_flight, row.peak_waiting) == ((4, 3, 2, 1), (1, 2, 3, 4))
    assert row.bubble_fraction == pytest.approx(3 / 27)


def test_text_and_json_show_w():
    schedule = build_schedule("zero_bubble", 2, 3)
    simulation = simulate(schedule)
    text = schedule_text(schedule, simulation)
    assert "W its weight gradients" in text
    assert "most waiting for W   1 2" in text
    rank = schedule_to_dict(schedule, simulation)["ranks"][0]
    assert rank["order"] == [1, 1, -1, 1, -1, -1]
    assert ["W", 0, 0] in rank["steps"]


def test_the_first_w_before_its_b_is_found():
    assert too_early(parse_order("F0.0 B0.0 W0.0 W1.0 B1.0")) == Action("W", 1, 0)
    assert too_early(parse_order("F0.0 B0.0 W0.0")) is None
