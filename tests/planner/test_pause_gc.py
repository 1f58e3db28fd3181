"""While a plan is made: no garbage is looked for, freed pages go back to the system, a long step says what it is at."""

import ctypes
import gc
import io
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor, nn

from passes.errors import PlanError
from planner import capture, plan, progress
from planner.capture.model.meta_init import give_back_freed
from planner.pause_gc import gc_paused, is_planning
from planner.progress import see_one, shown_by, shown_if_slow
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


# ---- pages that were freed below what still lives go back to the system


PIECE, COUNT = 100_000, 1_000  # bytes: too small for glibc to ask the system for each


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_gaps_between_what_still_lives_go_back():
    pieces: list[bytes | None] = [b"x" * PIECE for _ in range(COUNT)]
    pieces[:-1] = [None] * (COUNT - 1)
    before = resident()
    give_back_freed()
    assert before - resident() > PIECE * COUNT // 2
    assert pieces[-1]


def test_a_library_without_the_function_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    give_back_freed()


# ---- a step that takes long says what it is at; a quick one says nothing


def test_a_slow_step_says_what_it_is_at_while_it_runs_and_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", out)
    with shown_if_slow("capturing the model", after_seconds=0.0):
        deadline = time.monotonic() + HANG_SECONDS
        while not out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert out.getvalue() == "capturing the model …\n"
    assert out.getvalue().splitlines()[1].startswith("capturing the model: ")


def test_a_quick_step_and_a_step_of_another_rank_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", out)
    with shown_if_slow("planning"):
        pass
    monkeypatch.setenv("RANK", "1")
    with shown_if_slow("planning", after_seconds=0.0):
        time.sleep(0.05)
    assert out.getvalue() == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_counts_what_a_slow_step_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "__stderr__", out)
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.0)
    with shown_if_slow("capturing the model", after_seconds=0.0):
        deadline = time.monotonic() + HANG_SECONDS
        while not out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        see_one("ops")
        see_one("ops")
        assert out.getvalue().endswith("capturing the model: 2 ops …")
    assert out.getvalue().rpartition("\r\x1b[K")[2].startswith("capturing the model: ")
    shown: list[str] = []
    with shown_by(shown.append), shown_if_slow("capturing the model", after_seconds=0.0):
        while not shown and time.monotonic() < deadline:
            see_one("ops")
    assert shown[0].startswith("capturing the model: ")


def test_a_pipe_gets_no_counts_and_nothing_is_counted_outside_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", out)
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0.0)
    see_one("ops")
    with shown_if_slow("capturing the model", after_seconds=0.0):
        while not out.getvalue():
            see_one("ops")
        see_one("ops")
    assert "ops" not in out.getvalue()
