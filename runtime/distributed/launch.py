"""Starts local ranks: N processes that run one function with the environment that torchrun would set.

    launch(function, 4, *args) -> [result of rank 0, …, result of rank 3]

The parent hosts the rendezvous store: no other process can take its port, and it lives as long as any rank. The store
and the ranks listen only on the loopback (``this_host``). Ranks are forked from a server process that has imported
torch once, so that they start fast. When one rank fails, or time is up, all ranks end, and may be started again; they
also end when the parent ends in any way.

The parent is the first to notice that a rank died. It publishes this on the board, where ranks with a lost peer look up
the cause. Ranks share a secret of this launch, or the user's: other users of the host can reach the store, but their
entries have no valid signature.

The parent also detects ranks that were stopped (SIGSTOP) before their first heartbeat; later the other ranks do so
sooner. If the launcher itself was stopped, as by Ctrl-Z, that time does not count.
"""

import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Any

from passes.errors import RunError
from runtime.distributed import early_server
from runtime.distributed.default_group import BOARD, BOARD_TIMEOUT
from runtime.distributed.faults.activity import Page
from runtime.distributed.faults.board import SECRET, Board, Signer
from runtime.distributed.faults.failure import Failure
from runtime.distributed.faults.watch import STOPPED, STOPPED_SECONDS, start_of, state_of
from runtime.distributed.rank_process import Given, Launcher, Outbox, Outcome, run_rank
from runtime.distributed.stopping import Forwarding
from runtime.distributed.this_host import HOST, check_host, hosted_store, interface_names

STOP_SECONDS = 60.0  # for ranks to finish a step and save, after SIGTERM or Ctrl-C
PRELOADED = ["torch", "torch.distributed"]
AS_HERE = {
    "peft",
    "torch._dynamo",
    "torch.export",
    "planner.api",
    "runtime.engine.engine",
    "runtime.training.loop",
    "transformers",
}
GRACE_SECONDS = 3.0  # for ranks to end by themselves after the first failure
WATCHED_SECONDS = 12.0  # the same for ranks that watch each other
LOOK_SECONDS = 0.5  # between two checks
TELLS_SECONDS = 1.0  # for the last output of the rank that failed first, when all others have ended
STANDSTILL_SECONDS = STOPPED_SECONDS + 4.0
_MOST_BETWEEN = 2.0  # seconds between two checks that count at most: the launcher may have been stopped itself


class RankError(RunError):
    """A failure of a rank other than bad input. The message is the first failure, in one line, and its place.
    ``last_lines``: the last line of each failed rank's output, by rank.
    """

    def __init__(self, text: str, last_lines: Mapping[int, str] | None = None) -> None:
        super().__init__(text)
        self.last_lines = dict(last_lines or {})


def launch(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_seconds: float = 600.0,
    max_restarts: int = 0,
    on_restart: Callable[[int, str], None] | None = None,
    on_stop: Callable[[int], None] | None = None,
    stop_seconds: float = STOP_SECONDS,
) -> list[Any]:
    """Run ``function(*args)`` on ``num_ranks`` local ranks and return their results in rank order.

    ``function``, a function of an importable module, ``args`` and the results are pickled.

    After a failure other than bad input, all ranks are started again, up to ``max_restarts`` times, with
    TORCHELASTIC_RESTART_COUNT and the same TORCHELASTIC_RUN_ID in their environment, and a new ``timeout_seconds``.
    Before a restart, the failure is printed to stderr and ``on_restart(number of the restart, failure)`` is called.

    SIGTERM and Ctrl-C are forwarded to the ranks as SIGTERM. If all ranks return within ``stop_seconds``, ``launch``
    calls ``on_stop(signal)`` and returns; otherwise it ends the ranks and this process. A second signal ends all at
    once.

    Raises the PlanError of the first rank that raised one, or RankError for any other failure or when time is up.
    """
    run_id = uuid.uuid4().hex
    for attempt in range(max_restarts + 1):
        ranks = LocalRanks(num_ranks, attempt, timeout_seconds, run_id)
        with Forwarding(ranks.pids, stop_seconds) as signals, ranks.ended(signals):
            ranks.start(function, args)
            ranks.wait(signals)
        if signals.received is not None and any(outcome.failed for outcome in ranks.outcomes):
            signals.end()
        if signals.received is not None and on_stop is not None:
            on_stop(signals.received)
        try:
            return _results(ranks.outcomes, ranks.failures, ranks.timed_out, timeout_seconds)
        except RankError as error:
            if attempt == max_restarts:
                raise
            print(f"{error}\nrestart {attempt + 1} of {max_restarts}", file=sys.stderr, flush=True)
            if on_restart is not None:
                on_restart(attempt + 1, str(error))
    raise AssertionError("an attempt ends with results or an error")


def _results(outcomes: list[Outcome], published: list[Failure], timed_out: bool, timeout_seconds: float) -> list[Any]:
    """Return the results, or raise the first failure. ``published``: by ranks and their parent, in this order."""
    failed = sorted((o for o in outcomes if o.failed), key=lambda outcome: (outcome.of_a_peer, outcome.seconds))
    if not failed:
        return [outcome.result for outcome in outcomes]
    ranks = {outcome.rank for outcome in failed}
    first = next((failure for failure in published if failure.rank in ranks), failed[0].failure)
    assert first is not None
    last_lines = {outcome.rank: outcome.last_line for outcome in outcomes if outcome.failed}
    if timed_out and failed[0].seconds == inf and not published:
        late = sorted(ranks)
        raise RankError(f"ranks {late} did not finish in {timeout_seconds:g} s and were terminated", last_lines)
    error = outcomes[first.rank].error
    if error is not None:
        raise error
    if first.is_input:
        raise first.plan_error
    raise RankError(first.text, last_lines)


class LocalRanks:
    """The ranks of one attempt. Owns the store, the processes, their outboxes and pages, and the pipe by which they
    notice the end of the parent.
    """

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
        self._pages = [Page() for _ in range(num_ranks)]
        self._processes: list[Any] = []

    def start(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Start the ranks. The timeout counts from the last start, after the imports of the fork server."""
        launcher = Launcher.this()
        for rank, (outbox, page) in enumerate(zip(self._outboxes, self._pages, strict=True)):
            given = Given(rank, self._environment(rank), self._alive_here, launcher, outbox, page)
            process = self._context.Process(target=run_rank, args=(given, function, args), daemon=True)
            process.start()
            self._processes.append(process)
        self._deadline = time.monotonic() + self._timeout_seconds

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.exitcode is None]

    def wait(self, signals: Forwarding) -> None:
        """Wait until all ranks have ended, one has failed (then shortly for the others), or time is up."""
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
                    self._publish_end(rank)
            pids = {rank: self._processes[rank].pid for rank in running.values()}
            for rank, seconds in standstill.look(pids).items():
                failed_at = min(failed_at, time.monotonic())
                self._publish(Failure(rank, self._place(rank), f"{STOPPED}, seen for {seconds:.0f} s"))

    def _grace(self, running: Iterable[int]) -> float:
        """Return the seconds that running ranks have after the first rank has failed."""
        self._board = self._board.latest()
        if self._board.session is None:
            return GRACE_SECONDS
        failed = {failure.rank for failure in self._board.failures()}
        return TELLS_SECONDS if failed.issuperset(running) else WATCHED_SECONDS

    @contextmanager
    def ended(self, signals: Forwarding) -> Iterator[None]:
        """End all processes after the block, and read their outcomes; those written after the timeout do not count."""
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
                    outcome = _silent(rank, process.exitcode, rank in ended)
                self.outcomes.append(outcome)
            for memory in (*self._outboxes, *self._pages):
                memory.close()
            self.failures = before if self.timed_out else list(self._board.failures())

    def _publish_end(self, rank: int) -> None:
        """Publish the failure of a rank that ended without publishing it."""
        outcome = self._outboxes[rank].read()
        if outcome is None:
            outcome = _silent(rank, self._processes[rank].exitcode)
            self._publish(Failure(rank, self._place(rank), outcome.last_line))
        elif outcome.failure is not None and not outcome.of_a_peer:
            self._publish(outcome.failure)

    def _publish(self, failure: Failure) -> None:
        """Publish a failure, unless the rank, or a watcher of it, has done so."""
        if all(published.rank != failure.rank for published in self._board.failures()):
            Board(self._store, signer=Signer(self._secret)).publish(failure)

    def _place(self, rank: int) -> str:
        """Return the rank's last activity."""
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
    """Return the context of a fork server that imports torch before any rank starts; of spawn on other systems."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    method = early_server.METHOD if early_server.METHOD in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == early_server.METHOD:
        # ranks need the modules that this process has imported: model files of Hugging Face take seconds
        slow = [name for name in list(sys.modules) if name in AS_HERE or _is_model_file(name)]
        if not early_server.imported.issuperset(filter(_is_model_file, slow)):
            early_server.end()  # since it was forked, the command has imported modules that ranks need
        context.set_forkserver_preload([early_server.FORK_SERVER, *PRELOADED, *slow])
    return context


def _is_model_file(name: str) -> bool:
    return name.startswith("transformers.models.") and ".modeling_" in name


def _join_all(processes: list[Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(None if seconds == inf else max(0.0, deadline - time.monotonic()))


def _end(processes: list[Any], grace_seconds: float) -> set[int]:
    """End processes by SIGTERM, then SIGKILL (at once if stopped), and return the ranks that were running."""
    running = {rank for rank, process in enumerate(processes) if process.is_alive()}
    for process in (processes[rank] for rank in running):
        process.kill() if state_of(process.pid, start_of(process.pid)) == "stopped" else process.terminate()
    _join_all(processes, grace_seconds)
    for process in processes:  # kill all before waiting for any: no rank should see that another is gone
        if process.is_alive():
            process.kill()
    _join_all(processes, inf)
    return running


def _silent(rank: int, exit_code: int | None, ended_here: bool = False) -> Outcome:
    """Return the outcome of a rank that wrote none: it died before the peers that report it, unless its launcher ended
    it (``ended_here``).
    """
    if ended_here:
        cause = "ended by its launcher"
    elif exit_code is not None and exit_code < 0:
        cause = f"killed by {signal.Signals(-exit_code).name}"
    else:
        cause = f"ended without a result, exit code {exit_code}"
    failure = Failure(rank, f"rank {rank}", cause)
    return Outcome(rank, failure=failure, last_line=cause, of_a_peer=ended_here, seconds=inf if ended_here else 0.0)


class Standstill:
    """Detection of stopped ranks. Owns the seconds for which each rank has been stopped."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._looked = time.monotonic()

    def look(self, pids: Mapping[int, int]) -> dict[int, float]:
        """Return rank → seconds for which it has been stopped, for ranks that count as dead. ``pids``: by rank."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _MOST_BETWEEN), now
        stopped = {rank for rank, pid in pids.items() if state_of(pid, start_of(pid)) == "stopped"}
        self._seconds = {rank: self._seconds.get(rank, 0.0) + passed for rank in stopped}
        return {rank: seconds for rank, seconds in self._seconds.items() if seconds > STANDSTILL_SECONDS}
