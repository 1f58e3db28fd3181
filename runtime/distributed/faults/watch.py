"""The thread of a rank that sends heartbeats, watches other ranks, and ends this process if the main thread cannot.

After a failure the main thread has a moment to leave its collective by itself, then the process ends: on gloo nothing
else ends a wait for a stopped peer.

It is a thread, not a process: it sends no heartbeats while the main thread holds the GIL, but on one host the kernel
distinguishes dead ranks from silent ones (``Judge``), and every call of the store releases the GIL. It reads plain
attributes of the main thread, so a step costs nothing.

Ranks on this host are judged by the state of their process, other ranks by missing heartbeats:

    on this host     its process is gone                                          dead
                     its process is stopped, without a heartbeat for a while      dead
                     its process runs, however silent                             alive: it may hold the GIL
    elsewhere        silent for long                                              dead
                     silent, and connections of peers were closed                 dead sooner

A judge that was itself held up restarts its counts: a machine that was suspended is not dead.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from passes.errors import PlanError
from runtime.distributed.faults.activity import Activity, Page, own_page
from runtime.distributed.faults.board import Board, Pulse
from runtime.distributed.faults.failure import Failure

HURRY_SECONDS = 0.2  # between rounds after a failure
ENGAGED_SECONDS = 3.0  # for the main thread to notice a failure by itself, in a collective
OUTSIDE_SECONDS = 10.0  # and in the user's code, if a rank is dead
UNREACHABLE_SECONDS = 5.0  # silence of the store that counts as its end
LINE_SECONDS = 2.0  # at one activity before heartbeats name the source line
STORE_SECONDS = 11.0  # longer than any call of the store

LastWords = Callable[[Failure], None]


def print_last_words(failure: Failure) -> None:
    sys.stderr.write(f"\n{failure.text}\n{failure}\n" if failure.text != str(failure) else f"\n{failure}\n")
    sys.stderr.flush()


last_words: LastWords = print_last_words
_running: set[Watch] = set()


def leave() -> None:
    """Stop the watches of this process, which ends without a failure or has published it."""
    for watch in list(_running):
        watch.stop()


@atexit.register
def _end_before_the_interpreter() -> None:
    """Wait for the threads: one that returns from the store at exit of the interpreter would abort the process."""
    watches = [thread for thread in threading.enumerate() if isinstance(thread, Watch)]
    for watch in watches:
        watch.end()
    for watch in watches:
        watch.join(STORE_SECONDS)


BEAT_SECONDS = 1.0
STOPPED_SECONDS = 6.0
REMOTE_SECONDS = 30.0
LOST_SECONDS = 6.0
HELD_UP_SECONDS = 4.0
STOPPED = "its process is stopped (SIGSTOP)"
State = Literal["gone", "stopped", "runs", "unknown"]


class Judge:
    """The decision which ranks are dead. Owns the time of each rank's last heartbeat, by this rank's clock."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._heard: dict[int, tuple[int, float]] = {}
        self._gone: set[int] = set()
        self._looked = 0.0

    def dead(
        self, pulses: Iterable[Pulse], states: Mapping[int, State], now: float, *, peers_were_lost: bool
    ) -> dict[int, str]:
        """Return dead rank → reason. ``states``: of the processes on this host, by rank."""
        was_held_up = now - self._looked > HELD_UP_SECONDS
        self._looked = now
        reasons = {}
        gone = set()
        for pulse in pulses:
            beat, heard = self._heard.get(pulse.rank, (-1, now))
            if pulse.beat != beat or was_held_up:
                heard = now
            self._heard[pulse.rank] = (pulse.beat, heard)
            state = states.get(pulse.rank, "unknown") if pulse.host == self.host else "unknown"
            if state == "gone" and not pulse.has_left:
                gone.add(pulse.rank)
            reason = _reason(state, now - heard, peers_were_lost, pulse.rank in self._gone)
            if reason and not pulse.has_left:
                reasons[pulse.rank] = reason
        self._gone = gone  # dead in the second round: a rank that ends normally reports this first
        return reasons


def _reason(state: State, silent: float, peers_were_lost: bool, was_gone: bool) -> str:
    if state == "gone":
        return "its process has died" if was_gone else ""
    if state == "stopped":
        return f"{STOPPED}, no heartbeat for {silent:.0f} s" if silent > STOPPED_SECONDS else ""
    if state == "unknown" and silent > (LOST_SECONDS if peers_were_lost else REMOTE_SECONDS):
        return f"no heartbeat for {silent:.0f} s: its process or its host is down"
    return ""


def host_key() -> str:
    """Return a key that is equal for processes in one pid namespace of one boot of a machine."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {os.getpid()}"  # states of other processes are unknown


def start_of(pid: int) -> str:
    """Return the start of a process, in ticks of the machine, which differs if a pid is reused; "" if unknown."""
    fields = _fields(pid)
    return fields[19] if fields else ""


def state_of(pid: int, start: str) -> State:
    if not start:
        return "unknown"
    fields = _fields(pid)
    if fields is None or fields[19] != start or fields[0] in "ZX":
        return "gone"
    return "stopped" if fields[0] in "Tt" else "runs"


def _fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name, which may contain blanks and brackets; None without it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


class Watch(threading.Thread):
    """The watching thread of a rank. Owns its pulse and the judge of the others."""

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
        self._pages: dict[int, Page | None] = {}  # of watched ranks on this host, mapped while they lived
        self._beat = 0
        self._left: set[int] = set()
        self._reached = time.monotonic()
        self._over = threading.Event()
        self._start_of_process = start_of(os.getpid())
        self._lock = threading.Lock()  # no beat may follow the last one, which says that this rank has left

    def run(self) -> None:
        _running.add(self)
        while not self._over.is_set():
            try:
                self.look()
                self._reached = time.monotonic()
            except PlanError as error:  # an entry of the store is not from this run
                self._refuse(error)
            except Exception as error:  # any error of the store
                self._unreachable(error)
            self._over.wait(HURRY_SECONDS if self.first or self.peers_were_lost else BEAT_SECONDS)

    def stop(self) -> None:
        """Send the last beat, which says that this rank has left, and end."""
        self.end()
        with self._lock, suppress(Exception):
            self.board.beat(self.pulse(has_left=True))

    def end(self) -> None:
        """End after the current round."""
        self._over.set()
        _running.discard(self)

    def look(self) -> None:
        """Make one round: beat, read the first failure, report late calls and dead ranks."""
        with self._lock:
            if self._over.is_set():
                return
            self._beat += 1
            (self.board.join if self._beat == 1 else self.board.beat)(self.pulse())
        self._hear(self.board.first())
        if self.activity.is_late and (own := self.pulse()).line:
            self._report(own.stuck)
        for rank, reason in self._dead().items():
            page = self._pages.get(rank)  # has its last action; its last heartbeat has an earlier activity
            at = (page.read() if page is not None else "") or self._last[rank].at
            self._report(Failure(rank, at, reason))
        self._end_if_nobody_else_does()

    def pulse(self, *, has_left: bool = False) -> Pulse:
        activity = self.activity
        line, waits = activity.line() if activity.seconds > LINE_SECONDS else ("", False)
        process = (self.host, os.getpid(), self._start_of_process)
        at, page = str(activity), activity.page.descriptor if activity.page is not None else -1
        return Pulse(activity.rank, self._beat, *process, at, activity.seconds, line, waits, has_left, page)

    def pulses(self) -> dict[int, Pulse]:
        """Return the last pulse of each rank that has joined."""
        return self.board.pulses(self.board.hosts())

    # ---- parts of a round

    def _dead(self) -> dict[int, str]:
        if len(self._hosts) < self.world_size:
            self._hosts = self.board.hosts()
        pulses = self.board.pulses(self.watched())
        self._last = pulses
        self._left |= {rank for rank, pulse in pulses.items() if pulse.has_left}
        for pulse in pulses.values():
            if pulse.host == self.host and pulse.rank not in self._pages:
                self._pages[pulse.rank] = Page.of(pulse.pid, pulse.page)
        states: dict[int, State] = {r: state_of(p.pid, p.start) for r, p in pulses.items() if p.host == self.host}
        return self.judge.dead(pulses.values(), states, time.monotonic(), peers_were_lost=self.peers_were_lost)

    def watched(self) -> list[int]:
        """Return the ranks to watch: the others of this host, and rank 0; for rank 0 also one rank of each other host,
        the first that has not left. Ranks of a host watch each other, and all are silent if it is down.
        """
        own, first = self.activity.rank, dict[str, int]()
        for rank, host in self._hosts.items():
            if host != self.host and rank not in self._left:
                first.setdefault(host, rank)
        here = [rank for rank, host in self._hosts.items() if host == self.host or (own and rank == 0)]
        return [rank for rank in (*here, *(first.values() if own == 0 else ())) if rank != own]

    def _report(self, failure: Failure) -> None:
        """Publish a failure for all ranks, unless there is an earlier one."""
        if self.first is None:
            self.board.publish(failure)
            self._hear(self.board.first())

    def _hear(self, failure: Failure | None) -> None:
        if failure != self.first:
            self.first, self._first_at = failure, time.monotonic()

    def _refuse(self, error: PlanError) -> None:
        """Publish an error of the store's entries; the main thread has a moment to notice it by itself."""
        self._reached = time.monotonic()
        if self.first is None:
            self.first, self._first_at = Failure.of(self.activity.rank, str(self.activity), error), time.monotonic()
            with suppress(Exception):
                self.board.publish(self.first)
        self._end_if_nobody_else_does()

    def _end_if_nobody_else_does(self) -> None:
        if self.first is None or self.activity.is_failing:
            return
        is_own = self.first.rank == self.activity.rank  # reported by others: the main thread is stuck
        waited = time.monotonic() - self._first_at
        if self.activity.is_engaged or is_own:
            is_over = waited > ENGAGED_SECONDS
        else:
            is_over = waited > OUTSIDE_SECONDS and self._has_ended()
        if is_over:
            self._end(self.first)

    def _has_ended(self) -> bool:
        """Return whether the rank that failed first is gone: then no further step is possible."""
        assert self.first is not None
        if self.first.rank not in self._hosts:
            return False
        pulse = self.board.pulses([self.first.rank])[self.first.rank]
        if pulse.has_left:
            return True
        return pulse.host == self.host and state_of(pulse.pid, pulse.start) in ("gone", "stopped")

    def _unreachable(self, error: Exception) -> None:
        """End the process if the store has not answered for a while: ranks cannot exchange failures without it."""
        silent = time.monotonic() - self._reached
        if self.is_closing or self.activity.is_failing or silent < UNREACHABLE_SECONDS:
            return
        host = f"{os.environ.get('MASTER_ADDR', 'the store')}:{os.environ.get('MASTER_PORT', '')}"
        whose = "the launcher of the ranks" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") else "rank 0"
        cause = f"the store at {host} has not answered for {silent:.0f} s ({type(error).__name__}): {whose} has ended"
        self._end(Failure(self.activity.rank, str(self.activity), cause))

    def _end(self, failure: Failure) -> None:
        if self.activity.is_failing or self._over.is_set():
            return
        with suppress(Exception):
            self.stop()
        try:
            last_words(failure)
        finally:
            os._exit(2 if failure.is_input else 1)
