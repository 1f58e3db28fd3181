"""Failures of a rank and its peers: a rank publishes its own failure before its groups end, and looks up a peer's.

    with faults.during("update", step):     an error inside is published as this rank's failure; if it only reports
        ...                                 a lost peer, the published failure of the peer is raised

The first failure in the store is the cause of all others. An error that only reports a lost peer waits a moment for
that failure; without one, it names ranks with a dead process or a stuck main thread.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, TypeVar, cast

from passes.errors import PlanError, RunError, message_of
from runtime.distributed.faults.activity import START, Activity
from runtime.distributed.faults.board import Board, Pulse
from runtime.distributed.faults.failure import (
    Failure,
    PeerError,
    StepError,
    cause_of,
    first_line,
    is_of_a_peer,
    is_of_time,
)
from runtime.distributed.faults.watch import HURRY_SECONDS, Watch

CAUSE_SECONDS = 10.0  # time to find a peer that died
STUCK_SECONDS = 2.0  # time for a published failure after a timeout, before a stuck rank is sought
_standing: list[tuple[Board, str]] = []  # failures of this process that were not withdrawn
Method = TypeVar("Method", bound=Callable[..., Any])


class Faults:
    """The failures of one rank. Owns its activity and, with several ranks, the thread that watches them."""

    def __init__(self, activity: Activity, board: Board | None = None, world_size: int = 1) -> None:
        self.activity, self.board = activity, board
        self.watch = Watch(board, activity, world_size) if board is not None else None
        _standing.clear()  # not withdrawn: ranks in the old groups still need them, though this process continues
        if self.watch is not None:
            self.watch.start()

    @contextmanager
    def during(self, phase: str, step: int) -> Iterator[None]:
        """Run a call that all ranks take part in; for nested calls, the outermost counts.

        Raises PlanError, StepError, and any BaseException that is not an Exception, unchanged; other errors of the
        block as StepError.
        """
        if self.activity.is_engaged and self.activity.now.phase != START:
            yield
            return
        withdraw()
        self.activity.begin(phase, step)
        self._raise_what_is_known()
        try:
            yield
        except BaseException as error:
            self.activity.is_failing = True
            raised = self.told(error)
            if raised is error:
                raise
            raise raised from cause_of(error)
        self.activity.rest()

    def told(self, error: BaseException) -> BaseException:
        """Publish ``error``, or find its cause on another rank; return the error to raise instead."""
        if is_of_a_peer(error) and self.watch is not None:
            return self._of_a_peer(error)
        self.publish(error)
        if isinstance(error, RunError | PlanError) or not isinstance(error, Exception):
            return error
        return StepError(f"{self.activity}: {type(error).__name__}: {message_of(error)}")

    def told_as_it_is(self, error: BaseException) -> BaseException:
        """Do as ``told``, but keep the type of this rank's own error: for a constructor, before any step."""
        raised = self.told(error)
        return raised if is_of_a_peer(error) else error

    def publish(self, error: BaseException) -> None:
        """Publish ``error`` as this rank's failure; the first of all ranks is the cause. Raises nothing."""
        self.activity.is_failing = True
        if self.board is None or _standing or is_of_a_peer(error):
            return
        with suppress(Exception):  # the store may be gone
            publish(self.board, Failure.of(self.activity.rank, str(self.activity), error))

    def fail(self, error: BaseException) -> None:
        """Publish ``error``, and stop watching and beating."""
        self.publish(error)
        self.close()

    def closing(self) -> None:
        """Note that the end of the store is not a failure from now on."""
        if self.watch is not None:
            self.watch.is_closing = True

    def close(self) -> None:
        """Stop watching and beating: this rank leaves by itself."""
        self.closing()
        if self.watch is not None:
            self.watch.stop()

    def _raise_what_is_known(self) -> None:
        first = self.watch.first if self.watch is not None else None
        if first is not None and first.rank != self.activity.rank and self.board is not None:
            with suppress(RuntimeError):
                first = self.board.first()
            if first is not None and first.rank != self.activity.rank:
                self.activity.is_failing = True
                raise self._peer_error("not begun", first)

    # ---- the rank that failed

    def _of_a_peer(self, error: BaseException) -> BaseException:
        lost = re.sub(r"^\[\S*\]\s*", "", first_line(str(cause_of(error)))).partition(". ")[0]  # not gloo's own files
        if isinstance(error, PeerError):
            return error
        first = self._first_failure(is_of_time(error))
        if first is not None:
            return self._peer_error(lost, first)
        return StepError(f"{self.activity}: {lost}; no rank reported a failure, and none was found dead or stuck")

    def _peer_error(self, lost: str, first: Failure) -> BaseException:
        if first.is_input:
            return first.plan_error
        more = [line for line in first.text.splitlines()[1:]]
        return PeerError("\n".join([f"{self.activity}: {lost}", *more, str(first)]))

    def _first_failure(self, by_time: bool) -> Failure | None:
        """Return a failure that is published within a moment; otherwise publish that of a stuck rank, if any."""
        assert self.watch is not None
        assert self.board is not None
        self.watch.peers_were_lost = True
        deadline = time.monotonic() + (STUCK_SECONDS if by_time else CAUSE_SECONDS)
        try:
            while (first := self.board.first()) is None and time.monotonic() < deadline:
                time.sleep(HURRY_SECONDS)
            if first is None and (stuck := _stuck(self.watch.pulses())) is not None:
                self.board.publish(stuck.stuck)
                first = self.board.first()
        except RuntimeError as error:
            return Failure(self.activity.rank, str(self.activity), f"the store has ended too: {first_line(str(error))}")
        return first


def publish(board: Board, failure: Failure) -> None:
    """Publish a failure of this process, which ``withdraw`` takes back."""
    _standing.append((board, board.publish(failure)))


def is_published() -> bool:
    """Return whether a failure of this process is on the board."""
    return bool(_standing)


def withdraw() -> None:
    """Withdraw this process' failures: its caller has handled the error, and it continues."""
    while _standing:
        board, name = _standing.pop()
        with suppress(Exception):
            board.withdraw(name)


def _stuck(pulses: dict[int, Pulse]) -> Pulse | None:
    """Return the pulse of the rank that has stayed longest at a line without waiting for another rank."""
    busy = [p for p in pulses.values() if p.line and not p.waits and not p.has_left]
    return max(busy, key=lambda pulse: pulse.seconds, default=None)


def shared_call(phase: str) -> Callable[[Method], Method]:
    """Decorate a method of a class with ``running``, which has ``groups.faults`` and ``step_index``.

    ``phase``: name of the call in errors, until the method sets another.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            running = self.running
            with running.groups.faults.during(phase, running.step_index):
                return method(self, *args, **options)

        return cast(Method, call)

    return decorate
