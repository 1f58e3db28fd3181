"""Who is taken for dead: by the state of its process here, by silence elsewhere; never one that only is silent here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from runtime.distributed.faults.board import Pulse
from runtime.distributed.faults.watch import REMOTE_SECONDS, STOPPED_SECONDS, Judge, host_key, start_of, state_of
from tests.tools.limits import HANG_SECONDS


def pulse(beat: int, host: str = "here", **more: bool) -> Pulse:
    return Pulse(1, beat, host, 1234, "99", "rank 1, step 5, update", **more)


def verdicts(states: list, beats: list[int], host: str = "here", step: float = 1.0, **options: bool) -> list[bool]:
    """Whether rank 1 is dead at each look, one every ``step`` seconds."""
    judge, found = Judge("here"), []
    lost = options.pop("lost", False)
    for look, (state, beat) in enumerate(zip(states, beats, strict=True)):
        dead = judge.dead([pulse(beat, host, **options)], {1: state}, 100 + look * step, peers_were_lost=lost)
        found.append(1 in dead)
    return found


def test_a_process_that_is_gone_is_dead_at_the_second_look():
    assert verdicts(["runs", "gone", "gone"], [1, 2, 2]) == [False, False, True]


def test_one_that_said_that_it_leaves_is_not():
    assert not any(verdicts(["gone"] * 50, [2] * 50, has_left=True))


def test_one_that_runs_may_be_silent_for_ever():
    assert not any(verdicts(["runs"] * 1000, [2] * 1000))


def test_a_stopped_one_is_dead_once_it_is_silent():
    found = verdicts(["stopped"] * 12, [2] * 12)
    assert found.index(True) == STOPPED_SECONDS + 1
    assert not any(verdicts(["stopped"] * 12, list(range(12))))  # a debugger that lets it go in between


@pytest.mark.parametrize(("lost", "after"), [(False, REMOTE_SECONDS), (True, 6)])
def test_elsewhere_silence_alone_counts_sooner_where_connections_were_closed(lost, after):
    found = verdicts(["gone"] * 40, [2] * 40, host="there", lost=lost)
    assert found.index(True) == after + 1


def test_a_judge_that_was_held_up_itself_counts_anew():
    assert not any(verdicts(["unknown"] * 10, [2] * 10, host="there", step=100.0))


def test_what_the_kernel_says_of_a_process():
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({2 * HANG_SECONDS})"])
    start = start_of(child.pid)
    assert (state_of(child.pid, start), state_of(child.pid, "1"), state_of(child.pid, "")) == (
        "runs",
        "gone",
        "unknown",
    )
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert state_of(child.pid, start) == "stopped"
    child.kill()
    deadline = time.monotonic() + HANG_SECONDS
    while state_of(child.pid, start) != "gone":  # not yet waited for
        assert time.monotonic() < deadline
    child.wait()
    assert state_of(child.pid, start) == "gone"
    assert host_key() == host_key()
