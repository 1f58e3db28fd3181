"""Ranks that are stopped before their first heartbeat, and machines that refuse memory without a name."""

from __future__ import annotations

import os
import pickle
import signal
import time
from typing import Any

import pytest

from runtime.distributed.faults.activity import Page, own_page
from runtime.distributed.launch import STANDSTILL_SECONDS, RankError, Standstill, launch
from runtime.distributed.rank_process import Outbox, Outcome
from tests.tools.limits import HANG_SECONDS


def stop_rank_1() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(2 * HANG_SECONDS)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_rank_that_is_stopped_at_its_start_is_named_and_ends_all() -> None:
    with pytest.raises(RankError, match=r"^rank 1: its process is stopped \(SIGSTOP\), seen for \d+ s$"):
        launch(stop_rank_1, 2, timeout_seconds=HANG_SECONDS)


def test_time_in_which_the_launcher_did_not_look_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(2 * HANG_SECONDS)
        os._exit(0)
    clock = [time.monotonic()]
    monkeypatch.setattr("runtime.distributed.launch.time.monotonic", lambda: clock[0])

    def look(after: float) -> list[int]:
        clock[0] += after
        return list(watched.look({3: child}))

    try:
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        watched = Standstill()
        assert look(1000.0) == []
        assert look(1000.0) == []
        assert [look(1.0) for _ in range(int(STANDSTILL_SECONDS))][-1] == [3]
        os.kill(child, signal.SIGCONT)
        os.waitpid(child, os.WCONTINUED)
        assert look(1.0) == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def refused(label: str) -> int:
    raise PermissionError(1, "Operation not permitted")


def test_without_memfd_results_and_places_go_over_files_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a seccomp profile."""
    monkeypatch.setattr(os, "memfd_create", refused, raising=False)
    outbox = Outbox()
    outbox.write(pickle.dumps(Outcome(0, result=5)))
    read: Any = outbox.read()
    assert read.result == 5
    outbox.close()
    page = Page()
    page.write("step 3")
    seen = Page.of(os.getpid(), page.descriptor)
    assert seen is not None
    assert seen.read() == "step 3"
    assert own_page() is not None
