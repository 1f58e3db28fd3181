"""The directory of the fork server's socket is removed for a launcher that is gone, and for no other process."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.distributed.faults.watch import start_of
from runtime.distributed.rank_process import Launcher
from tests.tools.limits import HANG_SECONDS


def directory_of(told: multiprocessing.connection.Connection) -> None:
    told.send(Launcher.this().directory)


@pytest.mark.thorough
def test_a_launcher_that_lives_keeps_it() -> None:
    launcher = Launcher.this()
    launcher.remove_directory()
    assert Path(launcher.directory).is_dir()


def test_one_that_is_gone_does_not(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        launcher = Launcher(process.pid, start_of(process.pid), str(tmp_path))
        process.kill()
        process.wait(HANG_SECONDS)
    launcher.remove_directory()
    assert not tmp_path.exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_that_another_one_started_has_none_of_its_own(method: str) -> None:
    context = multiprocessing.get_context(method)
    told, tell = context.Pipe(duplex=False)
    process = context.Process(target=directory_of, args=(tell,))
    process.start()
    assert told.poll(HANG_SECONDS)
    assert told.recv() == ""
    process.join(HANG_SECONDS)
