"""While a plan is made: no garbage is looked for, no watch of ours looks at the frames of the thread that makes it."""

from __future__ import annotations

import gc
import threading

import pytest

import planner.api
from planner import plan
from planner.errors import PlanError
from planner.undisturbed import is_planning, undisturbed
from runtime.distributed.faults.activity import Activity
from tests.models.plannable import build, spec_of


def test_a_plan_is_undisturbed_from_its_first_step_on(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[bool, bool]] = []
    capture = planner.api.capture

    def looked(*args, **kwargs):
        seen.append((is_planning(threading.get_ident()), gc.isenabled()))
        return capture(*args, **kwargs)

    monkeypatch.setattr(planner.api, "capture", looked)
    plan(build("gpt"), spec_of("gpt", mesh={"tp": 2}))
    assert seen == [(True, False)]
    assert not is_planning(threading.get_ident())
    assert gc.isenabled()


def test_one_inside_of_another_and_an_error_end_as_they_began():
    here = threading.get_ident()
    with undisturbed():
        with pytest.raises(PlanError), undisturbed():
            raise PlanError("no", fix="none")
        assert is_planning(here)
        assert not gc.isenabled()
    assert not is_planning(here)
    assert gc.isenabled()


def test_plans_of_two_threads_that_overlap_leave_the_collector_on():
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with undisturbed():
            first_is_in.set()
            assert second_is_in.wait(10)
        first_is_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_is_in.wait(10)
    with undisturbed():
        second_is_in.set()
        assert first_is_out.wait(10)
        assert not gc.isenabled()
    thread.join(10)
    assert gc.isenabled()


def test_who_has_switched_the_collector_off_finds_it_off():
    gc.disable()
    try:
        with undisturbed():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_no_watch_looks_at_a_thread_that_plans():
    activity = Activity()
    with undisturbed():
        assert activity.line() == ("", False)
    assert activity.line()[0]
