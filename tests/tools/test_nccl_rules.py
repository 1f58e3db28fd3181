"""The rules themselves: what they hold up, and what they let pass."""

from collections.abc import Callable
from typing import Any

import torch

from tests.tools.nccl_rules import NcclRules, Outcome, run_ranks


def between_two(work: Callable[[int, NcclRules, Any], Any], **options: bool) -> Outcome:
    """``work(rank, rules, group)`` on two ranks of one group."""
    return run_ranks(2, lambda rank, rules: work(rank, rules, rules.new_group([0, 1])), **options)


def test_a_message_arrives_whichever_side_comes_first():
    def work(rank, rules, group):
        for first in (0, 1):
            box = torch.full((2,), float(rank))
            (rules.send if rank == first else rules.recv)(box, 1 - rank, group=group)
            assert box.tolist() == [first, first]
        return "ended"

    assert between_two(work).results == ["ended", "ended"]


def test_two_that_both_send_first_are_stuck_and_each_says_on_what():
    def work(rank, rules, group):
        rules.isend(torch.zeros(1), 1 - rank, group=group).wait()
        rules.recv(torch.zeros(1), 1 - rank, group=group)

    outcome = between_two(work)
    assert outcome.stuck == {
        0: "send 0 from rank 0 on the communicator of ranks [0, 1]",
        1: "send 0 from rank 1 on the communicator of ranks [0, 1]",
    }
    assert len(outcome.held_by_sends) == 2


def test_a_first_use_holds_the_host_until_all_members_come_and_only_where_it_builds():
    def work(rank, rules, group):
        other = rules.new_group([0, 1])
        order = (group, other) if rank == 0 else (other, group)
        works = [rules.irecv(torch.zeros(1), 1 - rank, group=g) for g in order]
        works += [rules.isend(torch.zeros(1), 1 - rank, group=g) for g in order]
        for each in works:
            each.wait()

    assert set(between_two(work).stuck.values()) == {"the first use of the communicator of ranks [0, 1]"}
    assert between_two(work, lazy=False).stuck == {}


def test_a_collective_waits_for_every_member():
    def work(rank, rules, group):
        if rank == 0:
            rules.all_reduce(torch.zeros(1), group=group)

    assert between_two(work, lazy=False).stuck == {0: "all_reduce on the communicator of ranks [0, 1]"}


def test_the_kth_send_meets_the_kth_receive_whatever_its_tag():
    def work(rank, rules, group):
        for tag in (0, 1) if rank == 0 else (1, 0):
            (rules.isend if rank == 0 else rules.irecv)(torch.zeros(1), 1 - rank, group=group, tag=tag)

    assert str(between_two(work).error).startswith("order: ")


def test_the_error_of_one_rank_ends_those_that_wait_for_it():
    def work(rank, rules, group):
        if rank == 1:
            raise ValueError("mine")
        rules.recv(torch.zeros(1), 1, group=group)

    outcome = between_two(work)
    assert repr(outcome.error) == "ValueError('mine')"
    assert outcome.stuck == {}


def test_a_work_tells_its_end_only_where_the_backend_does():
    def work(rank, rules, group):
        posted = (rules.isend if rank == 0 else rules.irecv)(torch.zeros(1), 1 - rank, group=group)
        posted.wait()
        return posted.is_completed()

    assert between_two(work).results == [True, True]
    assert between_two(work, tells_ends=False).results == [False, False]
