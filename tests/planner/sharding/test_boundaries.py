"""What one stage sends to the next: the live values in the shapes of one rank, never partial sums."""

from __future__ import annotations

from math import prod

import pytest

from passes.partition.type_changes import sent_type
from passes.program.program import BoundaryPlan
from passes.types.types import I, P, R, V
from planner import Plan
from planner.sharding.shards import boundary
from tests.models.tiny import BATCH, LENGTH, WIDTH, planned


def sent_at(made: Plan, cut: int) -> tuple[BoundaryPlan, ...]:
    assert made.decisions is not None
    return boundary(made.decisions, cut)


def test_partial_sums_are_added_before_they_are_sent_and_all_else_goes_as_it_is():
    assert [sent_type(p) for p in (P, I, R, V(1, 8))] == [I, I, R, V(1, 8)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_residual_is_whole_on_each_rank(tp):
    ((sent,), nothing) = (sent_at(planned(pp=2, tp=tp), cut) for cut in (0, 1))
    assert nothing == ()
    assert (sent.shape, sent.dtype) == ((BATCH, LENGTH, WIDTH), "float32")
    assert sent.placement in ("I", "R"), "the same on every rank, whatever its gradient is"
    assert (sent.bytes, sent.requires_grad) == (4 * BATCH * LENGTH * WIDTH, True)


def test_under_sequence_parallelism_a_rank_sends_its_part():
    (sent,) = sent_at(planned(pp=2, tp=2, sequence_parallel=True), 0)
    assert sent.shape == (BATCH, LENGTH // 2, WIDTH)
    assert sent.placement == "V(1:4)"
    assert sent.bytes == 4 * prod(sent.shape)


def test_nothing_is_sent_before_the_first_stage_and_after_the_last():
    made = planned("mlp mlp mlp", pp=3)
    assert [len(sent_at(made, cut)) for cut in (-1, 0, 1, 2, 3)] == [0, 1, 1, 0, 0]


def test_every_stage_receives_what_the_one_before_sends():
    stages = planned("mlp mlp mlp", pp=3).stages
    assert [stage.sends for stage in stages[:-1]] == [stage.receives for stage in stages[1:]]
    assert (stages[0].receives, stages[-1].sends) == ((), ())
