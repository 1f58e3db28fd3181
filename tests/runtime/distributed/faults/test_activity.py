"""Errors name steps as the log counts them, from 1."""

from __future__ import annotations

import pytest

from planner.pipeline.schedule import Action
from runtime.distributed.faults.activity import BATCH, FORWARD, SEARCH, UPDATE, Activity


def at_work(phase: str, index: int, at: int | None = None) -> Activity:
    """In a call of an engine that has made ``index`` steps; ``at``: the index of the step that an action is of."""
    activity = Activity(2)
    activity.begin(phase, index)
    if at is not None:
        activity.at(at, 0, Action("F", 1, 0))
    return activity


@pytest.mark.parametrize(
    ("activity", "words"),
    [
        (at_work(BATCH, 4), "step 5, batch"),
        (at_work(BATCH, 4, at=4), "step 5, microbatch 1, forward (F1.0)"),
        (at_work(UPDATE, 4), "step 5, update"),
        (at_work("save", 5), "step 5, save"),  # five are made, as `saved step 5`
        (at_work("evaluation", 5, at=5), "step 5, microbatch 1, forward (F1.0)"),
        (at_work(SEARCH, 5), f"step 5, {SEARCH}"),
        (at_work(SEARCH, 5, at=4), "step 5, microbatch 1, forward (F1.0)"),
    ],
)
def test_a_step_has_the_number_of_the_log(activity: Activity, words: str) -> None:
    assert str(activity).endswith(words)


def test_after_a_step_its_number_stays_until_the_next_call() -> None:
    activity = at_work(BATCH, 4, at=4)
    activity.off(FORWARD)
    activity.rest()
    assert str(activity) == "rank 2, step 5, between steps"
    assert not activity.is_engaged
