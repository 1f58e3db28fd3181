"""Main function of a launched process: run the function, report its outcome, and end together with the launcher."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from runtime.distributed.faults import watch
from runtime.distributed.faults.failure import Failure
from runtime.distributed.faults.page import Page, use
from runtime.distributed.outcomes import Outbox, Outcome


def run_rank(
    rank: int,
    environment: dict[str, str],
    alive: Connection,
    directory: str,
    outbox: Outbox,
    page: Page,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    gc.freeze()  # a fork: garbage collection would touch, and so copy, every page of earlier imports
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # the fork server ignores it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent forwards it
    os.environ.update(environment)
    use(page)
    threading.Thread(target=_exit_with_parent, args=(alive, directory), daemon=True).start()
    watch.last_words = lambda failure: outbox.write(pickle.dumps(_heard(rank, failure)))
    torch.set_num_threads(1)
    try:
        outcome = Outcome(rank, result=function(*args))
    except BaseException as error:
        outcome = Outcome.failed_by(rank, error)
    # Pickle all of it before writing: a result that cannot be pickled must become this rank's error, not half a file.
    try:
        content = pickle.dumps(outcome)
    except Exception as error:
        outcome = Outcome.failed_by(rank, error)
        content = pickle.dumps(outcome)
    watch.last_words = lambda failure: None
    outbox.write(content)
    sys.stdout.flush()
    sys.stderr.flush()
    # named semaphores (tqdm makes some) would be reported as leaked
    multiprocessing.util._run_finalizers(0)  # pyright: ignore[reportAttributeAccessIssue]
    # No interpreter shutdown: a process group that a failed rank left open may wait there for its peers.
    watch.leave()
    os._exit(0 if not outcome.failed else 2 if outcome.error else 1)


def _heard(rank: int, failure: Failure) -> Outcome:
    return Outcome(rank, failure=failure, of_a_peer=True, last_line=str(failure), seconds=time.monotonic())


def _exit_with_parent(alive: Connection, directory: str) -> None:
    """Block until the parent's end of the pipe is gone, then end this rank; a killed parent left its directory."""
    try:
        alive.recv()
    except (EOFError, OSError):
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)
