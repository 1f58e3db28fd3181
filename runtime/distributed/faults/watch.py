"""The thread of a rank that sends heartbeats, watches other ranks, and ends this process if the main thread cannot.

    each second    beat; read the first failure; look at the ranks of this host, and at rank 0 (which looks
                   at one rank of each other host)
    a failure      the main thread has a moment to come out of its exchange by itself, then the process ends:
                   on gloo nothing else ends a wait for a peer that is stopped

A thread, not a process: it sends no heartbeats while the interpreter is busy, but on one host the kernel distinguishes
dead ranks from silent ones (see ``judge``), and every call of the store releases the interpreter. It reads plain
attributes of the main thread, so a step costs nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from passes.errors import PlanError
from runtime.distributed.faults.activity import Activity
from runtime.distributed.faults.board import Board, Pulse
from runtime.distributed.faults.failure import Failure
from runtime.distributed.faults.judge import BEAT_SECONDS, Judge
from runtime.distributed.faults.page import Pages, own_page
from runtime.distributed.faults.processes import State, host_key, start_of, state_of

HURRY_SECONDS = 0.2  # between looks once something is wrong
ENGAGED_SECONDS = 3.0  # for the main thread to notice a failure by itself, in an exchange
OUTSIDE_SECONDS = 10.0  # and in the user's own code, if a rank is dead
UNREACHABLE_SECONDS = 5.0
LINE_SECONDS = 2.0
STORE_SECONDS = 11.0  # a call of the store ends before

LastWords = Callable[[Failure], None]


def print_last_words(failure: Failure) -> None:
    sys.stderr.write(f"\n{failure.text}\n{failure}\n" if failure.text != str(failure) else f"\n{failure}\n")
    sys.stderr.flush()


last_words: LastWords = print_last_words
_running: set[Watch] = set()


def leave() -> None:
    """The process ends without a failure, or has published it."""
    for watch in list(_running):
        watch.stop()


@atexit.register
def _end_before_the_interpreter() -> None:
    """A thread that comes back from the store while the interpreter ends would abort the process: SIGABRT in place of
    its exit code."""
    watches = [thread for thread in threading.enumerate() if isinstance(thread, Watch)]
    for watch in watches:
        watch.end()
    for watch in watches:
        watch.join(STORE_SECONDS)


class Watch(threading.Thread):
    """Owns the pulse of this rank and the judge of the others."""

    def __init__(self, board: Board, activity: Activity, world_size: int) -> None:
        super().__init__(name="meshwright-watch", daemon=True)
        self.board, self.activity, self.world_size = board, activity, world_size
        self.host = host_key()
        activity.page = own_page()
        self.judge = Judge(self.host)
        self.first: Failure | None = None
        self.peers_were_lost = False
        self.is_closing = False
        self._first_at = 0.0
        self._hosts: dict[int, str] = {}
        self._pages = Pages()
        self._beat = 0
        self._left: set[int] = set()
        self._reached = time.monotonic()
        self._over = threading.Event()
        self._start_of_process = start_of(os.getpid())
        self._lock = threading.Lock()  # a beat after the last one would take back that this rank has left

    def run(self) -> None:
        _running.add(self)
        while not self._over.is_set():
            try:
                self.look()
                self._reached = time.monotonic()
            except PlanError as error:  # the entries of the store are not of this run
                self._refuse(error)
            except Exception as error:  # of the store, of every kind
                self._unreachable(error)
            self._over.wait(HURRY_SECONDS if self.first or self.peers_were_lost else BEAT_SECONDS)

    def stop(self, *, says_so: bool = True) -> None:
        """No more beats; ``says_so``: the others know that this is no death."""
        self.end()
        with self._lock, suppress(Exception):
            if says_so:
                self.board.beat(self.pulse(has_left=True))

    def end(self) -> None:
        """No round after this one."""
        self._over.set()
        _running.discard(self)

    def look(self) -> None:
        """One round."""
        with self._lock:
            if self._over.is_set():
                return
            self._tell()
        self._hear(self.board.first())
        for rank, reason in self._dead().items():
            if self.first is None:
                self.board.publish(self._death(rank, reason))
                self._hear(self.board.first())
        self._end_if_nobody_else_does()

    def pulse(self, *, has_left: bool = False) -> Pulse:
        activity = self.activity
        line, waits = activity.line() if activity.seconds > LINE_SECONDS else ("", False)
        process = (self.host, os.getpid(), self._start_of_process)
        at, page = str(activity), activity.page.descriptor if activity.page is not None else -1
        return Pulse(activity.rank, self._beat, *process, at, activity.seconds, line, waits, has_left, page)

    def pulses(self) -> dict[int, Pulse]:
        """The last of every rank that has joined."""
        return self.board.pulses(self.board.hosts())

    # ---- pieces of a round

    def _tell(self) -> None:
        self._beat += 1
        if self._beat == 1:
            self.board.join(self.pulse())
        else:
            self.board.beat(self.pulse())

    def _dead(self) -> dict[int, str]:
        if len(self._hosts) < self.world_size:
            self._hosts = self.board.hosts()
        pulses = self.board.pulses(self.watched())
        self._last = pulses
        self._left |= {rank for rank, pulse in pulses.items() if pulse.has_left}
        for pulse in pulses.values():
            if pulse.host == self.host:
                self._pages.map(pulse.rank, pulse.pid, pulse.page)
        states: dict[int, State] = {r: state_of(p.pid, p.start) for r, p in pulses.items() if p.host == self.host}
        return self.judge.dead(pulses.values(), states, time.monotonic(), peers_were_lost=self.peers_were_lost)

    def watched(self) -> list[int]:
        """The other ranks of this host, and rank 0. Rank 0 watches one rank of each other host, the first that has not
        left: the ranks there watch each other, and a host that is down is silent as a whole."""
        own, first = self.activity.rank, dict[str, int]()
        for rank, host in self._hosts.items():
            if host != self.host and rank not in self._left:
                first.setdefault(host, rank)
        here = [rank for rank, host in self._hosts.items() if host == self.host or (own and rank == 0)]
        return [rank for rank in (*here, *(first.values() if own == 0 else ())) if rank != own]

    def _death(self, rank: int, reason: str) -> Failure:
        return Failure(rank, self._pages.last_of(rank, self._last[rank].at), reason)

    def _hear(self, failure: Failure | None) -> None:
        if failure != self.first:
            self.first, self._first_at = failure, time.monotonic()

    def _refuse(self, error: PlanError) -> None:
        """All ranks hear of it; the main thread has a moment to come upon it by itself."""
        self._reached = time.monotonic()
        if self.first is None:
            self.first, self._first_at = Failure.of(self.activity.rank, str(self.activity), error), time.monotonic()
            with suppress(Exception):
                self.board.publish(self.first)
        self._end_if_nobody_else_does()

    def _end_if_nobody_else_does(self) -> None:
        if self.first is None or self.activity.is_failing:
            return
        is_own = self.first.rank == self.activity.rank  # reported by others: the main thread stands still
        waited = time.monotonic() - self._first_at
        if self.activity.is_engaged or is_own:
            is_over = waited > ENGAGED_SECONDS
        else:
            is_over = waited > OUTSIDE_SECONDS and self._has_ended()
        if is_over:
            self._end(self.first)

    def _has_ended(self) -> bool:
        """Whether the rank that failed first is gone: then this one can do no further step."""
        assert self.first is not None
        if self.first.rank not in self._hosts:
            return False
        pulse = self.board.pulses([self.first.rank])[self.first.rank]
        if pulse.has_left:
            return True
        return pulse.host == self.host and state_of(pulse.pid, pulse.start) in ("gone", "stopped")

    def _unreachable(self, error: Exception) -> None:
        """The host of the store is gone, or stands still: without it no rank hears of another."""
        silent = time.monotonic() - self._reached
        if self.is_closing or self.activity.is_failing or silent < UNREACHABLE_SECONDS:
            return
        host = f"{os.environ.get('MASTER_ADDR', 'the store')}:{os.environ.get('MASTER_PORT', '')}"
        whose = "the launcher of the ranks" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") else "rank 0"
        told = f"the store at {host} has not answered for {silent:.0f} s ({type(error).__name__}): {whose} has ended"
        self._end(Failure(self.activity.rank, str(self.activity), told))

    def _end(self, failure: Failure) -> None:
        if self.activity.is_failing or self._over.is_set():
            return
        with suppress(Exception):
            self.stop()
        try:
            last_words(failure)
        finally:
            os._exit(2 if failure.is_input else 1)
