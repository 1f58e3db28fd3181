"""A step that takes long says what it is at; a quick one says nothing."""

from __future__ import annotations

import io
import sys
import time

import pytest

from planner import progress
from planner.progress import see_one, shown_by, shown_if_slow
from tests.tools.limits import HANG_SECONDS


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
