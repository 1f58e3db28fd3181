"""The fork server of ``launch``, forked from a command at its beginning, in place of a new interpreter.

The command has imported what its ranks need. To import it again takes half of the CPU seconds of a launch on few ranks.
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from inspect import signature
from multiprocessing import resource_tracker, util
from typing import Any

import torch

from runtime.distributed.this_host import check_directory

METHOD = "forkserver"
FORK_SERVER = "runtime.distributed.fork_server"
imported: set[str] = set()  # modules of the server; empty if none was forked


def begin() -> None:
    """Fork it now, unless this process has what a fork must not inherit (threads, or a device in use), or another
    Python's ``multiprocessing`` does it otherwise: the launch then begins the ordinary server.

    Call it before any code of the user's is imported: ranks would find its modules as the command left them.
    """
    if METHOD not in multiprocessing.get_all_start_methods() or threading.active_count() > 1:
        return
    if torch.cuda.is_initialized() or not _is_as_known() or _server()._forkserver_pid is not None:
        return
    check_directory()  # of the server's socket
    resource_tracker.ensure_running()  # by a new interpreter, as ever
    multiprocessing.get_context(METHOD).set_forkserver_preload([FORK_SERVER])
    spawned = util.spawnv_passfds  # pyright: ignore[reportAttributeAccessIssue]
    util.spawnv_passfds = _forked  # pyright: ignore[reportAttributeAccessIssue]
    try:
        _server().ensure_running()
    finally:
        util.spawnv_passfds = spawned  # pyright: ignore[reportAttributeAccessIssue]
    if not imported:  # another Python has started it in another way, with less than ranks need
        _server()._stop()


def end() -> None:
    """Let the next launch begin another server; nothing if none was forked."""
    if imported:
        imported.clear()
        _server()._stop()


def _is_as_known() -> bool:
    """Whether this Python's fork server has the parts that are used here; they are its own, and may change."""
    try:
        server, spawn = _server(), util.spawnv_passfds  # pyright: ignore[reportAttributeAccessIssue]
        parameters = list(signature(spawn).parameters)
        parts = (server._stop, server._lock.acquire, server.ensure_running)
        is_callable = all(callable(part) for part in parts)
        return is_callable and parameters == ["path", "args", "passfds"] and hasattr(server, "_forkserver_pid")
    except (AttributeError, ImportError, ValueError):
        return False


def _server() -> Any:
    from multiprocessing import forkserver  # not on Windows

    return forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]


def _forked(path: bytes, arguments: Sequence[str], passed: Iterable[int]) -> int:
    """As ``multiprocessing.util.spawnv_passfds``: the id of a process that runs the code behind ``-c``."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        imported.update(sys.modules)
        return pid
    code = 1
    try:
        if not torch.cuda._is_in_bad_fork():  # else it ends, and a launch begins another
            _close_all_but(sorted(passed))
            _server()._lock = threading.Lock()  # its holder did not come along
            exec(arguments[-1], {})
    except SystemExit:
        code = 0
    finally:
        os._exit(code)


def _close_all_but(kept: Sequence[int]) -> None:
    """As an exec does: the server ends when the last other process has closed the pipe that it inherited here."""
    last = 2
    for handle in kept:
        os.closerange(last + 1, handle)
        last = handle
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))
