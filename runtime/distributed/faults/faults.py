"""Failures seen from a rank: it publishes its own before its groups end, and looks up and shows that of a peer.

    with faults.during("update", step):     an error inside is this rank's failure, published for all;
        ...                                 or that of a peer: then the published failure of the peer is raised

The first failure in the store is the cause of all others. An error that only reports a lost peer waits a
moment for that failure; without one, it names ranks with a dead process or a stuck main thread.
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

CAUSE_SECONDS = 10.0  # a peer that died is found within this; the store's order does the rest
STUCK_SECONDS = 2.0
_standing: list[tuple[Board, str]] = []  # published by this process and not withdrawn
Method = TypeVar("Method", bound=Callable[..., Any])


class Faults:
    """Owns this rank's activity and, with several ranks, the thread that watches them."""

    def __init__(self, activity: Activity, board: Board | None = None, world_size: int = 1) -> None:
        self.activity, self.board = activity, board
        self.watch = Watch(board, activity, world_size) if board is not None else None
        _standing.clear()  # it lives on, with other groups; those of the old ones still need its words
        if self.watch is not None:
            self.watch.start()

    @contextmanager
    def during(self, phase: str, step: int) -> Iterator[None]:
        """A call that all ranks take part in; of calls inside of each other the outermost counts.

        Raises PlanError, StepError, and any BaseException that is not an Exception, unchanged.
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
            told = self.told(error)
            if told is error:
                raise
            raise told from cause_of(error)
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
        """The same, but an error of this rank's own keeps its type: for a constructor, before any step."""
        told = self.told(error)
        return told if is_of_a_peer(error) else error

    def publish(self, error: BaseException) -> None:
        """This rank fails by ``error``; the first of all ranks to say so is the cause. Nothing is raised."""
        self.activity.is_failing = True
        if self.board is None or _standing or is_of_a_peer(error):
            return
        with suppress(Exception):  # the store may be gone
            publish(self.board, Failure.of(self.activity.rank, str(self.activity), error))

    def fail(self, error: BaseException) -> None:
        """Publish, and have no further part."""
        self.publish(error)
        self.close()

    def closing(self) -> None:
        """From here on a store that ends is no failure."""
        if self.watch is not None:
            self.watch.is_closing = True

    def close(self) -> None:
        """This rank has no further part, by its own will."""
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
        """A failure published within a moment; otherwise a stuck rank, published here. None if none is found."""
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
    """Of this process; it stands until the process continues after all."""
    _standing.append((board, board.publish(failure)))


def is_published() -> bool:
    """Whether a failure of this process is on the board."""
    return bool(_standing)


def withdraw() -> None:
    """This process continues after all: its caller has handled the error."""
    while _standing:
        board, name = _standing.pop()
        with suppress(Exception):
            board.withdraw(name)


def _stuck(pulses: dict[int, Pulse]) -> Pulse | None:
    """Of the rank that is longest at a line without waiting for another rank."""
    found = [p for p in pulses.values() if p.line and not p.waits and not p.has_left]
    return max(found, key=lambda pulse: pulse.seconds, default=None)


def shared_call(phase: str) -> Callable[[Method], Method]:
    """For methods of a class with ``running``, which has ``groups.faults`` and ``step_index``.

    ``phase``: its name in errors, until the method sets a finer one.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            running = self.running
            with running.groups.faults.during(phase, running.step_index):
                return method(self, *args, **options)

        return cast(Method, call)

    return decorate
