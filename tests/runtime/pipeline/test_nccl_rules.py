"""Every kind of schedule ends under NCCL's rules, with the real executor, transport, links and first use.

The table of cases and mutants: ``python -m tests.tools.pipeline_cases``.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import suppress

import pytest

from passes.errors import PlanError
from planner.pipeline.kinds import KINDS
from planner.pipeline.schedule import Schedule, build_schedule
from planner.pipeline.simulate import simulate
from tests.tools.nccl_rules import Outcome
from tests.tools.pipeline_cases import (
    NUM_ELEMENTS,
    CapOfFour,
    PostsNextFirst,
    WaitsForEachSend,
    run_schedule,
    schedules,
)
from tests.tools.scale_stages import scale_loss

GPIPE = ("gpipe", 2, 2)
FEW = ("interleaved_1f1b", 3, 3, 2)  # as many microbatches as ranks
LARGE_GROUPS = ("interleaved_1f1b", 2, 16, 2, 16)


def assert_right(outcome: Outcome, schedule: Schedule) -> None:
    """It ended, no send held a rank inside a step, and losses and gradients are those of the formula."""
    assert (outcome.stuck, outcome.error, outcome.held_by_sends) == ({}, None, [])
    expected = scale_loss(schedule.num_stages, schedule.num_microbatches, NUM_ELEMENTS)
    assert sum(ran.loss for ran in outcome.results) == expected
    assert sum(ran.evaluated for ran in outcome.results) == expected
    gradients = [gradient for ran in outcome.results for gradient in ran.gradients]
    assert gradients == [expected / 2] * schedule.num_stages


@pytest.mark.thorough
@pytest.mark.parametrize("tells_ends", [False, True], ids=["silent", "tells"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_of_every_kind_ends_and_no_send_is_waited_for_in_a_step(kind, tells_ends):
    """``silent``: works never say that they are through, as gloo's; then messages alone tell it."""
    cases = schedules(kind)
    assert len(cases) >= 30
    for schedule in cases:
        assert_right(run_schedule(schedule, tells_ends=tells_ends, with_flag=tells_ends), schedule)


@pytest.mark.parametrize("case", [GPIPE, FEW, LARGE_GROUPS], ids=str)
def test_without_the_first_use_ranks_are_stuck_on_a_receive_posted_ahead(case):
    outcome = run_schedule(build_schedule(*case), first_use=False)
    assert any(what.startswith("the first use of the communicator") for what in outcome.stuck.values())
    assert not any(outcome.results)


@pytest.mark.parametrize("case", [GPIPE, FEW, LARGE_GROUPS], ids=str)
def test_only_the_first_use_sticks_there(case):
    schedule = build_schedule(*case)
    assert_right(run_schedule(schedule, first_use=False, lazy=False), schedule)


def test_a_cap_on_sends_in_flight_is_stuck_with_large_groups():
    outcome = run_schedule(build_schedule(*LARGE_GROUPS), transport=CapOfFour)
    assert len(outcome.stuck) == 2
    assert all(what.startswith("send ") for what in outcome.stuck.values())


def test_waiting_for_each_send_is_stuck_and_where_it_is_not_it_is_seen():
    assert run_schedule(build_schedule("interleaved_1f1b", 2, 4, 2), transport=WaitsForEachSend).stuck
    ended = run_schedule(build_schedule("1f1b", 3, 4), transport=WaitsForEachSend)
    assert ended.stuck == {}
    assert ended.held_by_sends


def test_receives_posted_in_another_order_meet_other_messages():
    outcome = run_schedule(build_schedule("gpipe", 2, 4), executor=PostsNextFirst)
    assert "order: " in str(outcome.error)


@pytest.mark.parametrize("kind", KINDS)
def test_a_swap_on_one_rank_is_refused_by_the_planner_exactly_where_the_rules_break(kind):
    """Each pair of neighbouring actions of each rank, swapped: deadlock, another order, or harmless."""
    schedule = build_schedule(kind, 2, 4, 2 if KINDS[kind].runs_chunks else 1)
    verdicts = {(verdict_of_planner(mutant), verdict_of_rules(mutant)) for mutant in swapped(schedule)}
    assert ("order", "order") in verdicts
    assert verdicts <= {("order", "order"), ("deadlock", "deadlock"), ("ends", "ends")}


def swapped(schedule: Schedule) -> Iterator[Schedule]:
    for rank, order in enumerate(schedule.orders):
        for at in range(len(order) - 1):
            other = (*order[:at], order[at + 1], order[at], *order[at + 2 :])
            orders = (*schedule.orders[:rank], other, *schedule.orders[rank + 1 :])
            with suppress(PlanError):  # a W before its B is none
                yield dataclasses.replace(schedule, kind="custom", orders=orders)


def verdict_of_planner(schedule: Schedule) -> str:
    try:
        simulate(schedule)
    except PlanError as error:
        return "order" if "in another order" in error.what else "deadlock"
    return "ends"


def verdict_of_rules(schedule: Schedule) -> str:
    outcome = run_schedule(schedule)
    if outcome.error is not None:
        return "order" if "order: " in str(outcome.error) else "deadlock"  # a backward before its forward: KeyError
    return "deadlock" if outcome.stuck else "ends"
