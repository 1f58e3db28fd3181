"""What each link carries: the links of a pipeline, one order at both ends, and the error where the orders differ."""

import pytest

from passes.errors import PlanError
from planner.pipeline.links import Link, RankMessages, carried, check_links, links, received_by, sent_by
from planner.pipeline.schedule import build_schedule, format_order
from planner.pipeline.simulate import parse_schedule, planned, simulate

DOWN, UP = (0, 1, "F"), (1, 0, "B")


@pytest.mark.parametrize(
    ("pp", "vpp", "expected"),
    [
        (1, 1, ()),
        (2, 1, (DOWN, UP)),
        (2, 2, (DOWN, UP, (1, 0, "F"), (0, 1, "B"))),
        (3, 1, (DOWN, UP, (1, 2, "F"), (2, 1, "B"))),
        (3, 2, (DOWN, UP, (1, 2, "F"), (2, 1, "B"), (2, 0, "F"), (0, 2, "B"))),
    ],
)
def test_a_link_for_each_direction_between_neighbours_and_round_the_end_where_ranks_hold_chunks(pp, vpp, expected):
    assert links(pp, vpp) == expected


def test_what_a_link_carries_at_both_its_ends():
    schedule = build_schedule("interleaved_1f1b", 2, 2, 2)
    link = Link(1, 0, "F")  # stage 1 is chunk 0 of rank 1, stage 2 chunk 1 of rank 0
    ranks = [RankMessages(schedule.orders, rank, 4, schedule.fold) for rank in range(2)]
    out, into = carried(ranks[1], sent_by)[link], carried(ranks[0], received_by)[link]
    assert [message for message, _ in out] == [message for message, _ in into] == [("F", 1, 0), ("F", 1, 1)]
    assert format_order(tuple(action for _, action in out)) == "F0.0 F1.0"
    assert format_order(tuple(action for _, action in into)) == "F0.1 F1.1"


def test_every_message_is_on_one_link_once_at_each_end():
    schedule = build_schedule("interleaved_1f1b", 3, 7, 2, 4)
    ends = [
        [
            m
            for r in range(3)
            for found in carried(RankMessages(schedule.orders, r, 6, schedule.fold), by).values()
            for m, _ in found
        ]
        for by in (sent_by, received_by)
    ]
    boundaries, microbatches = range(6 - 1), range(7)
    expected = sorted((kind, b, m) for kind in "FB" for b in boundaries for m in microbatches)
    assert sorted(ends[0]) == sorted(ends[1]) == expected


FORWARDS = """
custom pp=2 vpp=1 microbatches=6 group=2
0: F0.0 F1.0 F2.0 F3.0 F4.0 F5.0 B0.0 B1.0 B2.0 B3.0 B4.0 B5.0
1: F0.0 F1.0 F2.0 F4.0 F3.0 F5.0 B0.0 B1.0 B2.0 B3.0 B4.0 B5.0
"""
BACKWARDS = """
custom pp=2 vpp=1 microbatches=2 group=2
0: F0.0 F1.0 B1.0 B0.0
1: F0.0 F1.0 B0.0 B1.0
"""


def test_forwards_in_another_order_are_refused_with_both_orders():
    with pytest.raises(PlanError) as error:
        simulate(parse_schedule(FORWARDS))
    assert error.value.what.splitlines() == [
        "schedule custom (pp = 2, vpp = 1, 6 microbatches): rank 0 sends values in another order than rank 1 receives "
        "them, from message 3 on",
        "  rank 0 sends them by   … F1.0 F2.0 F3.0 F4.0 F5.0",
        "  rank 1 needs them for  … F1.0 F2.0 F4.0 F3.0 F5.0",
    ]
    assert error.value.fix == "list these actions of rank 1 in the order in which rank 0 runs its own"


def test_backwards_in_another_order_are_refused_where_a_plan_is_made():
    with pytest.raises(PlanError, match="rank 1 sends gradients in another order than rank 0 receives them, from mess"):
        planned(parse_schedule(BACKWARDS))


def test_an_order_that_both_ends_have_is_no_kind_of_ours_and_passes():
    schedule = parse_schedule(BACKWARDS.replace("B0.0 B1.0", "B1.0 B0.0"))
    check_links(schedule)
    assert schedule.kind == "custom"
    assert simulate(schedule).duration == 2 * 3 + 3
