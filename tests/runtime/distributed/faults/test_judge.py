"""Who is taken for dead: by the state of its process here, by silence elsewhere; never one that only is silent here."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from planner.pipeline.schedule import Action
from runtime.distributed.faults.activity import BATCH, FORWARD, SEARCH, UPDATE, Activity, Now
from runtime.distributed.faults.board import Board, Pulse
from runtime.distributed.faults.watch import REMOTE_SECONDS, STOPPED_SECONDS, Judge, Watch, host_key, start_of, state_of
from tests.tools.commands import python
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


LATE_SECONDS = 60.0  # since the activity began

PROGRAM = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from runtime.distributed.faults import watch
from runtime.distributed.faults.activity import Activity
from runtime.distributed.faults.board import Board
from runtime.distributed.faults.faults import Faults
from runtime.distributed.this_host import HOST, hosted_store

watch.BEAT_SECONDS = 0.0  # always inside of the store
limit = timedelta(seconds=10)
host = hosted_store(limit)
watched = [Faults(Activity(rank), Board(TCPStore(HOST, host.port, None, False, limit), 1), 8) for rank in range(8)]
sys.exit(2)
"""


def test_a_refused_rank_ends_with_its_exit_code_though_its_threads_are_in_the_store() -> None:
    done = python("-c", PROGRAM)
    assert done.returncode == 2, done.stderr


def _watches(*hosts: str) -> list[Watch]:
    """Of a rank on each of these hosts, all joined; no thread runs."""
    store = HashStore()
    watches = [Watch(Board(store, 1), Activity(rank), len(hosts)) for rank in range(len(hosts))]
    for watch, host in zip(watches, hosts, strict=True):
        watch.host = host
        watch.board.join(watch.pulse())
    return watches


def test_a_function_of_the_users_that_is_late_is_published_at_its_line() -> None:
    (watch,) = _watches("a")
    watch.activity.now = Now("between steps", 3, time.monotonic() - LATE_SECONDS)
    told = []
    for limit in (timedelta(hours=1), timedelta(0)):
        with watch.activity.in_users_code(limit):
            looking = threading.Thread(target=watch.look)  # the watched line is that of this thread
            looking.start()
            looking.join(HANG_SECONDS)
        told.append(str(watch.first))
    assert told[0] == "None"
    assert re.fullmatch(
        rf"rank 0, step 3, between steps: stuck for {LATE_SECONDS:.0f} s at threading.py:\d+ in \w+", told[1]
    )


def test_rank_0_reads_one_rank_of_each_other_host_and_every_rank_its_own_host() -> None:
    zero, one, *others = _watches("a", "a", "b", "b", "b", "c")
    for watch in (zero, one, *others):
        watch.look()
    assert zero.watched() == [1, 2, 5]
    assert one.watched() == [0]
    assert others[1].watched() == [0, 2, 4]
    zero.board.beat(replace(others[0].pulse(), has_left=True))
    zero.look()
    assert zero.watched() == [1, 3, 5]


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
