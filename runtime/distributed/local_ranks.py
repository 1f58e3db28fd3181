"""The processes of one launch, as the process that started them sees them.

It holds the store, so that this lives as long as any rank, and it is the first to see that a rank died. It publishes
this on the board, in which ranks with a lost peer look for the cause. Ranks share a secret of this launch, or the
user's: other users of the host can reach the store, but their entries have no valid signature.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

from runtime.distributed import early_server
from runtime.distributed.default_group import BOARD, BOARD_TIMEOUT
from runtime.distributed.faults.board import Board
from runtime.distributed.faults.failure import Failure
from runtime.distributed.faults.judge import STOPPED
from runtime.distributed.faults.page import Page
from runtime.distributed.faults.processes import start_of, state_of
from runtime.distributed.forwarding import Forwarding
from runtime.distributed.loopback import HOST, hosted_store, interface_names
from runtime.distributed.outcomes import Outbox, Outcome
from runtime.distributed.rank_process import run_rank
from runtime.distributed.signatures import SECRET, Signer
from runtime.distributed.standstill import Standstill
from runtime.distributed.this_host import check_host

PRELOADED = ["torch", "torch.distributed"]
AS_HERE = {
    "peft",
    "torch._dynamo",
    "torch.export",
    "planner.api",
    "runtime.engine",
    "runtime.training.loop",
    "transformers",
}
GRACE_SECONDS = 3.0  # for ranks to end by themselves after the first failure
WATCHED_SECONDS = 12.0  # the same for ranks that watch each other
LOOK_SECONDS = 0.5
TELLS_SECONDS = 1.0  # for the last output of the rank that failed first, when all others have ended


class LocalRanks:
    """One attempt. Owns: the store, the processes, their outboxes and pages, the pipe by which they notice our end."""

    def __init__(self, num_ranks: int, attempt: int, timeout_seconds: float, run_id: str) -> None:
        self.num_ranks, self.attempt, self.run_id = num_ranks, attempt, run_id
        self.timed_out = False
        self.outcomes: list[Outcome] = []
        self.failures: list[Failure] = []
        self._timeout_seconds = timeout_seconds
        self._deadline = inf
        check_host()
        self._context = _context()
        self._store = hosted_store(BOARD_TIMEOUT)
        self._secret = os.environ.get(SECRET) or secrets.token_hex(32)
        self._board = Board(self._store, signer=Signer(self._secret))
        self._alive_here, self._alive_there = self._context.Pipe(duplex=False)
        self._outboxes = [Outbox() for _ in range(num_ranks)]
        self._pages = [Page.make() for _ in range(num_ranks)]
        self._processes: list[Any] = []

    def start(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Their time counts from here: what the fork server imports is none of it."""
        directory = multiprocessing.util.get_temp_dir()  # of the fork server's socket: ours, to remove at the end
        for rank, told in enumerate(zip(self._outboxes, self._pages, strict=True)):
            job = (rank, self._environment(rank), self._alive_here, directory, *told, function, args)
            process = self._context.Process(target=run_rank, args=job, daemon=True)
            process.start()
            self._processes.append(process)
        self._deadline = time.monotonic() + self._timeout_seconds

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.exitcode is None]

    def wait(self, signals: Forwarding) -> None:
        """Until all ranks ended well, or one failed (then shortly for the rest), or time ran out."""
        running = {process.sentinel: rank for rank, process in enumerate(self._processes)}
        failed_at = inf
        standstill = Standstill()
        if signals.received is not None:
            signals.tell()
        while running:
            grace_ends = inf if failed_at == inf else failed_at + self._grace(running.values())
            remaining = min(self._deadline, signals.deadline, grace_ends) - time.monotonic()
            if remaining <= 0:
                self.timed_out = signals.received is None and failed_at == inf
                return
            for sentinel in multiprocessing.connection.wait(list(running), timeout=min(remaining, LOOK_SECONDS)):
                rank = running.pop(sentinel)
                self._processes[rank].join()
                if self._processes[rank].exitcode:
                    failed_at = min(failed_at, time.monotonic())
                    self._tell_end(rank)
            pids = {rank: self._processes[rank].pid for rank in running.values()}
            for rank, seconds in standstill.look(pids).items():
                failed_at = min(failed_at, time.monotonic())
                self._publish(Failure(rank, self._place(rank), f"{STOPPED}, seen for {seconds:.0f} s"))

    def _grace(self, running: Iterable[int]) -> float:
        """The seconds that running ranks have after the first rank has failed."""
        self._board = self._board.latest()
        if self._board.session is None:
            return GRACE_SECONDS
        told = {failure.rank for failure in self._board.failures()}
        return TELLS_SECONDS if told.issuperset(running) else WATCHED_SECONDS

    @contextmanager
    def ended(self, signals: Forwarding) -> Iterator[None]:
        """End all processes, and read their outcomes. Words after the end of their time are no failures."""
        try:
            yield
        finally:
            before, now = list(self._board.failures()), time.monotonic()
            ended = _end(self._processes, GRACE_SECONDS if signals.received is None else 0.0)
            self._alive_there.close()
            self._alive_here.close()
            for rank, process in enumerate(self._processes):
                outcome = self._outboxes[rank].read()
                if outcome is None or (self.timed_out and outcome.seconds > now):
                    outcome = _ended_here(rank) if rank in ended else _silent(rank, process.exitcode)
                self.outcomes.append(outcome)
            for memory in (*self._outboxes, *self._pages):
                memory.close()
            self.failures = before if self.timed_out else list(self._board.failures())

    def _tell_end(self, rank: int) -> None:
        """The failure of a rank that could not publish it, or reported it only here."""
        outcome = self._outboxes[rank].read()
        if outcome is None:
            outcome = _silent(rank, self._processes[rank].exitcode)
            told = Failure(rank, self._place(rank), outcome.last_line)
        elif outcome.failed and not outcome.of_a_peer:
            assert outcome.failure is not None
            told = outcome.failure
        else:
            return
        self._publish(told)

    def _publish(self, failure: Failure) -> None:
        """Unless the rank, or a watcher of it, has published it."""
        if all(told.rank != failure.rank for told in self._board.failures()):
            Board(self._store, signer=Signer(self._secret)).publish(failure)

    def _place(self, rank: int) -> str:
        """The rank's last activity."""
        return self._pages[rank].read() or f"rank {rank}"

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            **os.environ,
            **interface_names(os.environ),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self._store.port),
            SECRET: self._secret,
            BOARD: f"{HOST}:{self._store.port}",
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch.distributed then joins the parent's store as a client
            "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            "TORCHELASTIC_RUN_ID": self.run_id,
        }


def _context() -> Any:
    """A fork server that has imported torch before any rank starts; spawn if there is none."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    method = early_server.METHOD if early_server.METHOD in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == early_server.METHOD:
        slow = [name for name in sys.modules if _is_slow_to_import(name)]
        early_server.end_without(filter(_is_model_file, slow))
        context.set_forkserver_preload([early_server.FORK_SERVER, *PRELOADED, *slow])
    return context


def _is_slow_to_import(name: str) -> bool:
    """Each rank will need the modules that this process has imported: Hugging Face model files take seconds."""
    return name in AS_HERE or _is_model_file(name)


def _is_model_file(name: str) -> bool:
    return name.startswith("transformers.models.") and ".modeling_" in name


def _join_all(processes: list[Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(None if seconds == inf else max(0.0, deadline - time.monotonic()))


def _end(processes: list[Any], grace_seconds: float) -> set[int]:
    """SIGTERM, then SIGKILL, for those that are stopped or only just forked. The ranks that ran until then."""
    running = {rank for rank, process in enumerate(processes) if process.is_alive()}
    for process in (processes[rank] for rank in running):
        process.kill() if state_of(process.pid, start_of(process.pid)) == "stopped" else process.terminate()
    _join_all(processes, grace_seconds)
    for process in processes:  # all before any is waited for: none is to see another gone
        if process.is_alive():
            process.kill()
    _join_all(processes, inf)
    return running


def _silent(rank: int, exit_code: int | None) -> Outcome:
    """One that ended without a word died before the peers that complain about it."""
    if exit_code is not None and exit_code < 0:
        said = f"killed by {signal.Signals(-exit_code).name}"
    else:
        said = f"ended without a result, exit code {exit_code}"
    return Outcome(rank, failure=Failure(rank, f"rank {rank}", said), last_line=said)


def _ended_here(rank: int) -> Outcome:
    """Whatever signal it took: it ran until then."""
    said = "ended by its launcher"
    return Outcome(rank, failure=Failure(rank, f"rank {rank}", said), last_line=said, of_a_peer=True, seconds=inf)
