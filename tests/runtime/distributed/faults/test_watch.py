"""A process that watches other ranks ends with its own exit code, whatever its threads do at that moment."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta

from torch.distributed import HashStore

from runtime.distributed.faults.activity import Activity, Now
from runtime.distributed.faults.board import Board
from runtime.distributed.faults.watch import Watch
from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT

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
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, timeout=HANG_SECONDS)
    assert done.returncode == 2, done.stderr.decode()


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
