"""Main function of a launched process: runs the function, reports its outcome, and ends together with the launcher.

The outcome is written to anonymous memory: it leaves no file behind, and a rank that is stopped while writing blocks no
process.
"""

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
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from passes.errors import PlanError, message_of
from runtime.distributed.faults import watch
from runtime.distributed.faults.activity import Page, SharedFile, use
from runtime.distributed.faults.failure import Failure, StepError, is_of_a_peer
from runtime.distributed.faults.watch import start_of, state_of


@dataclass(frozen=True)
class Given:
    """The arguments of a rank from its launcher, which holds the other end of the pipe ``alive`` while it lives."""

    rank: int
    environment: dict[str, str]
    alive: Connection
    launcher: Launcher
    outbox: Outbox
    page: Page


def run_rank(given: Given, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    rank, outbox = given.rank, given.outbox
    gc.freeze()  # after a fork, garbage collection would write to, and so copy, every page of earlier imports
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # the fork server ignores it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent forwards it
    os.environ.update(given.environment)
    use(given.page)
    threading.Thread(target=_exit_with_parent, args=(given.alive, given.launcher), daemon=True).start()
    of_a_peer = partial(Outcome, rank, of_a_peer=True)
    watch.last_words = lambda failure: outbox.write(
        pickle.dumps(of_a_peer(failure=failure, last_line=str(failure), seconds=time.monotonic()))
    )
    torch.set_num_threads(1)
    try:
        outcome = Outcome(rank, result=function(*args))
    except BaseException as error:
        outcome = Outcome.failed_by(rank, error)
    # pickled before writing: a result that cannot be pickled must become this rank's error, not half a file
    try:
        content = pickle.dumps(outcome)
    except Exception as error:
        outcome = Outcome.failed_by(rank, error)
        content = pickle.dumps(outcome)
    watch.last_words = lambda failure: None
    outbox.write(content)
    sys.stdout.flush()
    sys.stderr.flush()
    # otherwise named semaphores (tqdm makes some) would be reported as leaked
    multiprocessing.util._run_finalizers(0)  # pyright: ignore[reportAttributeAccessIssue]
    # no interpreter shutdown: an open process group of a failed rank may wait there for its peers
    watch.leave()
    os._exit(0 if not outcome.failed else 2 if outcome.error else 1)


def _exit_with_parent(alive: Connection, launcher: Launcher) -> None:
    """Wait until the parent's end of the pipe is gone, then remove a killed parent's directory and end this rank."""
    try:
        alive.recv()
    except (EOFError, OSError):
        launcher.remove_directory()
        os._exit(1)


@dataclass(frozen=True, slots=True)
class Launcher:
    """The process that launched the ranks. ``directory``: of its fork server's socket, "" if it is another's."""

    pid: int
    start: str
    directory: str

    @classmethod
    def this(cls) -> Launcher:
        # a process that multiprocessing started has the directory of its parent
        own = multiprocessing.parent_process() is None
        return cls(os.getpid(), start_of(os.getpid()), multiprocessing.util.get_temp_dir() if own else "")

    def remove_directory(self) -> None:
        """Remove the directory once the launcher is gone: a live one may launch again with the same fork server."""
        for _ in range(20 if self.directory else 0):
            if state_of(self.pid, self.start) == "gone":
                shutil.rmtree(self.directory, ignore_errors=True)
                return
            time.sleep(0.1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one rank: its result, or its failure at ``seconds`` (of one clock for all ranks).

    ``error``: a PlanError itself. ``of_a_peer``: the failure only reports that another rank is gone.
    ``last_line``: the last line of its error.
    """

    rank: int
    result: Any = None
    failure: Failure | None = None
    error: PlanError | None = None
    of_a_peer: bool = False
    last_line: str = ""
    seconds: float = 0.0

    @classmethod
    def failed_by(cls, rank: int, error: BaseException) -> Outcome:
        """Return the outcome of a failed function. It is not published here: an engine publishes its errors itself."""
        text = message_of(error)
        where = text.partition(": ")[0] if isinstance(error, StepError) else f"rank {rank}"
        return cls(
            rank,
            failure=Failure.of(rank, where, error),
            error=error if isinstance(error, PlanError) else None,
            of_a_peer=is_of_a_peer(error),
            last_line=text.splitlines()[-1] if text else type(error).__name__,
            seconds=time.monotonic(),
        )

    @property
    def failed(self) -> bool:
        return self.failure is not None


class Outbox(SharedFile):
    """The outcome of one rank, which its launcher reads."""

    LABEL = "meshwright-outcome"

    def write(self, content: bytes) -> None:
        with open(self.descriptor, "wb", closefd=False) as file:
            file.write(content)

    def read(self) -> Outcome | None:
        """Return the outcome of a rank that has ended; None if it wrote none, or only a part."""
        with open(self.descriptor, "rb", closefd=False) as file, suppress(EOFError, pickle.UnpicklingError):
            file.seek(0)
            return pickle.load(file)
        return None
