"""The fork server of ``launch``, forked from a command at its start, in place of a new interpreter.

The command has already imported the modules of its ranks. Importing them again takes half of the CPU seconds of a
launch on few ranks.
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
    """Fork the server now, unless this process has threads or uses a device, which a fork must not inherit, or the
    ``multiprocessing`` of this Python works differently: the launch then starts the ordinary server.

    Call it before any of the user's code is imported: ranks would inherit the state of its modules.
    """
    if METHOD not in multiprocessing.get_all_start_methods() or threading.active_count() > 1:
        return
    if torch.cuda.is_initialized() or not _is_as_known() or _server()._forkserver_pid is not None:
        return
    check_directory()  # of the server's socket
    resource_tracker.ensure_running()  # in a new interpreter, as usual
    multiprocessing.get_context(METHOD).set_forkserver_preload([FORK_SERVER])
    spawned = util.spawnv_passfds  # pyright: ignore[reportAttributeAccessIssue]
    util.spawnv_passfds = _forked  # pyright: ignore[reportAttributeAccessIssue]
    try:
        _server().ensure_running()
    finally:
        util.spawnv_passfds = spawned  # pyright: ignore[reportAttributeAccessIssue]
    if not imported:  # this Python has started the server in another way, with fewer modules
        _server()._stop()


def end() -> None:
    """End the forked server, if there is one: the next launch starts another."""
    if imported:
        imported.clear()
        _server()._stop()


def _is_as_known() -> bool:
    """Return whether this Python's fork server has the private parts that are used here, which may change."""
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
    """Fork a process that runs the code after ``-c``, and return its id, as ``util.spawnv_passfds`` does."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        imported.update(sys.modules)
        return pid
    code = 1
    try:
        if not torch.cuda._is_in_bad_fork():  # otherwise it ends, and a launch starts another
            _close_all_but(sorted(passed))
            _server()._lock = threading.Lock()  # the thread that holds the old one was not forked
            exec(arguments[-1], {})
    except SystemExit:
        code = 0
    finally:
        os._exit(code)


def _close_all_but(kept: Sequence[int]) -> None:
    """Close other descriptors, as exec does: the server ends when the last writer of its pipe has closed it."""
    last = 2
    for handle in kept:
        os.closerange(last + 1, handle)
        last = handle
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))
