"""Ranks of a command are forked from it as it was at its beginning, if they need nothing that it imported later."""

import multiprocessing
import multiprocessing.connection
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.distributed.faults.watch import start_of
from runtime.distributed.rank_process import Launcher
from tests.tools.commands import python
from tests.tools.limits import HANG_SECONDS

PROGRAM = """
import sys
from types import ModuleType
from runtime.distributed import early_server
from runtime.distributed.launch import launch

sys.seen = "early"
early_server.begin()
sys.seen = "late"
if sys.argv[1:] == ["model file"]:
    name = "transformers.models.new.modeling_new"
    sys.modules[name] = ModuleType(name)
print(launch(eval, 2, "getattr(__import__('sys'), 'seen', 'new'), __import__('os').environ['RANK']"))
"""
THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"


def seen(program: str, *arguments: str) -> str:
    done = python("-c", program, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.thorough
@pytest.mark.slow
def test_ranks_are_forked_from_the_command_at_its_beginning() -> None:
    assert seen(PROGRAM) == "[('early', '0'), ('early', '1')]"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("why", ["a thread", "model file"])
def test_a_new_server_begins_if_a_fork_would_not_do(why: str) -> None:
    program = THREAD + PROGRAM if why == "a thread" else PROGRAM
    assert seen(program, why) == "[('new', '0'), ('new', '1')]"


CHANGED = {
    "no spawnv_passfds": "del util.spawnv_passfds",
    "other arguments": "util.spawnv_passfds = lambda path, args, passfds, more: 0",
    "no server": "del forkserver._forkserver",
    "no _stop": "forkserver._forkserver = SimpleNamespace(_lock=Lock(), _forkserver_pid=None, ensure_running=print)",
    "no _lock": "forkserver._forkserver = SimpleNamespace(_stop=print, _forkserver_pid=None, ensure_running=print)",
    "no pid": "forkserver._forkserver = SimpleNamespace(_stop=print, _lock=Lock(), ensure_running=print)",
    "does not call it": "forkserver._forkserver = SimpleNamespace("
    "_stop=lambda: None, _lock=Lock(), _forkserver_pid=None, ensure_running=lambda: None)",
}
OTHER_PYTHON = """
import sys
from multiprocessing import forkserver, util
from threading import Lock
from types import SimpleNamespace
from runtime.distributed import early_server

for change in sys.argv[1:]:
    before = util.spawnv_passfds, forkserver._forkserver
    exec(change)
    early_server.begin()
    assert not early_server.imported, change
    util.spawnv_passfds, forkserver._forkserver = before
    assert forkserver._forkserver._forkserver_pid is None, change
early_server.begin()
print(len(early_server.imported) > 0)
"""


@pytest.mark.thorough
def test_another_pythons_fork_server_is_left_alone_in_silence() -> None:
    assert seen(OTHER_PYTHON, *CHANGED.values()) == "True"


def test_a_terminal_that_has_ascii_alone_shows_a_plan() -> None:
    code = "from runtime import cli; cli.app = lambda **_: print('2 × 3'); cli.main()"
    done = python("-c", code, PYTHONIOENCODING="ascii")
    assert done.stdout == "2 ? 3\n", done.stderr


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
