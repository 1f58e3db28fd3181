"""A process that watches other ranks ends with its own exit code, whatever its threads do at that moment."""

from __future__ import annotations

import subprocess
import sys

from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT

PROGRAM = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from runtime.distributed.faults import watch
from runtime.distributed.faults.activity import Activity
from runtime.distributed.faults.board import Board
from runtime.distributed.faults.faults import Faults
from runtime.distributed.loopback import HOST, hosted_store

watch.BEAT_SECONDS = 0.0  # always inside of the store
limit = timedelta(seconds=10)
host = hosted_store(limit)
watched = [Faults(Activity(rank), Board(TCPStore(HOST, host.port, None, False, limit), 1), 8) for rank in range(8)]
sys.exit(2)
"""


def test_a_refused_rank_ends_with_its_exit_code_though_its_threads_are_in_the_store() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, timeout=HANG_SECONDS)
    assert done.returncode == 2, done.stderr.decode()
