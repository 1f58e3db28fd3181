"""Start local ranks: N processes that run one function with the environment that torchrun would give them.

    launch(function, 4, *args) -> [result of rank 0, …, result of rank 3]

The parent hosts the rendezvous store, so no port can be taken between choosing it and using it. Ranks are forked from a
server process that has imported torch once, so starting them costs little. When one rank fails, or time is up, all end;
when the parent ends, however it ends, so do the ranks.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from planner.errors import PlanError

HOST = "127.0.0.1"
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "torch.export"]  # dynamo: torch.optim imports it
GRACE_SECONDS = 3.0  # how long ranks may go on after the first failure, to end by themselves


class RankError(RuntimeError):
    """A rank failed for another reason than bad input; the message holds its own traceback."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended: its result, or its error and when it was raised (seconds, one clock for all ranks)."""

    rank: int
    result: Any = None
    error: PlanError | None = None
    traceback: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.error is not None or bool(self.traceback)


def launch(function: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = 600.0) -> list[Any]:
    """Run ``function(*args)`` on ``num_ranks`` local ranks and return their results in rank order.

    ``function`` and ``args`` are pickled: a function at the top of an importable module. Results are pickled too.

    Raises: the PlanError of the first rank that raised one; RankError for any other failure or when time is up.
    """
    context = _context()
    alive_here, alive_there = context.Pipe(duplex=False)
    store = TCPStore(HOST, 0, None, True, timedelta(seconds=timeout_seconds), wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as directory:
        processes = []
        try:
            for rank in range(num_ranks):
                environment = _environment(rank, num_ranks, store.port)
                job = (rank, environment, alive_here, directory, function, args)
                processes.append(context.Process(target=_run_rank, args=job, daemon=True))
                processes[-1].start()
            timed_out = _wait(processes, timeout_seconds)
        finally:
            _end(processes)
            alive_there.close()
            alive_here.close()
        outcomes = [_outcome(directory, rank, process) for rank, process in enumerate(processes)]
    return _results(outcomes, timed_out, timeout_seconds)


def _context() -> Any:
    """A fork server that has imported torch before any rank starts; spawn where there is none."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([*PRELOADED, *(name for name in sys.modules if _is_slow_to_import(name))])
    return context


def _is_slow_to_import(name: str) -> bool:
    """What this process already needed, each rank will need again: Hugging Face model files take seconds."""
    return name == "transformers" or (name.startswith("transformers.models.") and ".modeling_" in name)


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch.distributed then joins the parent's store as a client
    }


def _run_rank(
    rank: int,
    environment: dict[str, str],
    alive: Connection,
    directory: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    threading.Thread(target=_exit_with_parent, args=(alive,), daemon=True).start()
    torch.set_num_threads(1)
    try:
        outcome = Outcome(rank, result=function(*args))
    except PlanError as error:
        outcome = Outcome(rank, error=error, seconds=time.monotonic())
    except BaseException:
        outcome = Outcome(rank, traceback=traceback.format_exc(), seconds=time.monotonic())
    # Pickle whole before writing: a result that cannot be pickled must become this rank's error, not half a file.
    try:
        content = pickle.dumps(outcome)
    except Exception:
        outcome = Outcome(rank, traceback=traceback.format_exc(), seconds=time.monotonic())
        content = pickle.dumps(outcome)
    path = _outcome_path(directory, rank)
    path.with_suffix(".part").write_bytes(content)
    path.with_suffix(".part").replace(path)
    sys.stdout.flush()
    sys.stderr.flush()
    # named semaphores (tqdm makes some) would be reported as leaked
    multiprocessing.util._run_finalizers(0)  # pyright: ignore[reportAttributeAccessIssue]
    # No interpreter shutdown: a process group that a failed rank left open may wait there for its peers.
    os._exit(0 if not outcome.failed else 2 if outcome.error else 1)


def _exit_with_parent(alive: Connection) -> None:
    """Block until the parent's end of the pipe is gone, then end this rank."""
    try:
        alive.recv()
    except (EOFError, OSError):
        os._exit(1)


def _wait(processes: list[Any], timeout_seconds: float) -> bool:
    """Until all ranks ended well or one failed (then shortly for the rest); True when time ran out."""
    deadline = time.monotonic() + timeout_seconds
    running = {process.sentinel: process for process in processes}
    while running:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return True
        for sentinel in multiprocessing.connection.wait(list(running), timeout=remaining):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                _join_all(list(running.values()), GRACE_SECONDS)
                return False
    return False


def _join_all(processes: list[Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _end(processes: list[Any]) -> None:
    started = [process for process in processes if process.pid is not None]
    for process in started:
        if process.is_alive():
            process.terminate()
    _join_all(started, GRACE_SECONDS)
    for process in started:
        if process.is_alive():
            process.kill()
            process.join()


def _outcome_path(directory: str, rank: int) -> Path:
    return Path(directory) / f"{rank}.pickle"


def _outcome(directory: str, rank: int, process: Any) -> Outcome:
    path = _outcome_path(directory, rank)
    if path.exists():
        return pickle.loads(path.read_bytes())
    ended_here = process.exitcode == -signal.SIGTERM
    # One that died without a word died before the peers that complain about it.
    return Outcome(
        rank, traceback=f"ended without a result, exit code {process.exitcode}\n", seconds=inf if ended_here else 0.0
    )


def _results(outcomes: list[Outcome], timed_out: bool, timeout_seconds: float) -> list[Any]:
    failed = sorted((outcome for outcome in outcomes if outcome.failed), key=lambda outcome: outcome.seconds)
    if not failed:
        return [outcome.result for outcome in outcomes]
    first = failed[0]
    if first.error is not None:
        raise first.error
    if timed_out and first.seconds == inf:
        ranks = [outcome.rank for outcome in failed]
        raise RankError(f"ranks {ranks} did not finish in {timeout_seconds:g} s and were ended")
    raise RankError(f"rank {first.rank} of {len(outcomes)} failed:\n{first.traceback}")
