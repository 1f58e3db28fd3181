"""While a plan is made: no garbage is looked for, no watch of ours looks at the frames of the thread that makes it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
from torch import Tensor, nn

from passes.errors import PlanError
from planner import capture, plan
from planner.pause_gc import gc_paused, is_planning
from runtime.distributed.faults.activity import Activity
from tests.tools.limits import HANG_SECONDS


class Telling(nn.Module):
    """Its forward fails, and says who disturbs it."""

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError(f"planning: {is_planning(threading.get_ident())}, collector: {gc.isenabled()}")


@pytest.mark.parametrize("make", [plan, capture])
def test_a_plan_is_undisturbed_from_its_first_step_on(make: Callable[..., object]):
    spec = {"mesh": {}, "batch": {"global": 1, "micro": 1}, "inputs": {"x": {"shape": [4], "dtype": "float32"}}}
    with pytest.raises(PlanError, match="planning: True, collector: False"):
        make(Telling(), spec)
    assert not is_planning(threading.get_ident())
    assert gc.isenabled()


def test_one_inside_of_another_and_an_error_end_as_they_began():
    here = threading.get_ident()
    with gc_paused():
        with pytest.raises(PlanError), gc_paused():
            raise PlanError("no", fix="none")
        assert is_planning(here)
        assert not gc.isenabled()
    assert not is_planning(here)
    assert gc.isenabled()


def test_plans_of_two_threads_that_overlap_leave_the_collector_on():
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with gc_paused():
            first_is_in.set()
            assert second_is_in.wait(HANG_SECONDS)
        first_is_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_is_in.wait(HANG_SECONDS)
    with gc_paused():
        second_is_in.set()
        assert first_is_out.wait(HANG_SECONDS)
        assert not gc.isenabled()
    thread.join(HANG_SECONDS)
    assert gc.isenabled()


def test_who_has_switched_the_collector_off_finds_it_off():
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_no_watch_looks_at_a_thread_that_plans():
    activity = Activity()
    with gc_paused():
        assert activity.line() == ("", False)
    assert activity.line()[0]
