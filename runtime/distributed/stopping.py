"""Handles SIGTERM, SIGUSR1 and Ctrl-C: a rank finishes its step, and all ranks stop after the same step.

    a signal                     sets a flag of this process; nothing is interrupted
    each update of an engine     sums the flags of all ranks, in the all-reduce of the norm
    ``agreed(report)``           returns the same on every rank: whether some rank should stop
    orders of rank 0             (a user's callback) a larger addend to the same sum; then rank 0 broadcasts them

Signals reach the ranks of one job at different moments, some before and some after a step; the sum is the same on all.

A launcher forwards them to its ranks (``runtime.distributed.launch.launch``).
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from types import FrameType
from typing import Any, Self

# schedulers send one of the first two before they take a machine away; Windows has no SIGUSR1
SIGNALS = (signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []), signal.SIGINT)
SAME_SECONDS = 2.0  # one Ctrl-C arrives twice if a launcher forwards it and the terminal sends it to all processes
ORDERS = 1 << 21  # greater than any sum of flags: no job has as many ranks
_received: int | None = None
_received_at = 0.0
_has_orders = False


def stop_requested() -> int | None:
    """Return the signal that asks this process to stop, inside ``with Stopping()``; None without one."""
    return _received


def asks() -> int:
    """Return this process' addend to the sum of an update: 1 to stop, ``ORDERS`` if it has orders for all ranks."""
    return int(_received is not None) + ORDERS * _has_orders


def announce_orders(has_orders: bool) -> None:
    """Set whether rank 0 has orders, which every rank learns at the next update; called on rank 0."""
    global _has_orders
    _has_orders = has_orders


class Stopping:
    """Handlers of these signals while a loop of steps runs. Does nothing outside the main thread.

    Ignored signals stay ignored: ranks of ``launch`` get only SIGTERM. A second Ctrl-C raises KeyboardInterrupt.

    with Engine(plan) as engine, Stopping() as stopping:
        for step in range(steps):
            report = engine.train_step(batch(step))
            if stopping.agreed(report):
                break
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        global _received
        _received = None
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, _note) for number in handled}
        return self

    def __exit__(self, *exception: object) -> None:
        global _received
        _received = None
        announce_orders(False)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def request(self) -> None:
        """Act as on SIGTERM: all ranks stop after the same step, the next one at the earliest."""
        _note(signal.SIGTERM, None)

    def agreed(self, report: Any) -> bool:
        """Return whether any rank got a stop request before the update of ``report``, a StepReport; equal on all ranks.

        Reads the report, which waits for the device if the step still runs there.
        """
        return report.stop_requested


def _note(number: int, frame: FrameType | None) -> None:
    global _received, _received_at
    now = time.monotonic()
    if _received is None:
        _received, _received_at = number, now
    elif number == signal.SIGINT and now - _received_at > SAME_SECONDS:
        raise KeyboardInterrupt


class Forwarding:
    """Handlers that forward these signals to ranks, inside ``with``. Does nothing outside the main thread."""

    def __init__(self, pids: Callable[[], Iterable[int]], grace_seconds: float) -> None:
        """``pids``: returns those of the running ranks. ``grace_seconds``: from the signal to ``deadline``."""
        self._pids, self._grace_seconds = pids, grace_seconds
        self._before: dict[int, Any] = {}
        self.received: int | None = None
        self.deadline = inf

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._forward) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def tell(self) -> None:
        """Send SIGTERM to the running ranks, also to those that started after the signal came."""
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def end(self) -> None:
        """Apply the signal's own effect to this process, after ``with``. Raises KeyboardInterrupt or SystemExit."""
        assert self.received is not None
        if self._before[self.received] is signal.SIG_DFL:
            sys.exit(128 + self.received)  # by Python's exit, which removes multiprocessing's files
        signal.raise_signal(self.received)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self.deadline = number, time.monotonic() + self._grace_seconds
            self.tell()
        else:
            self.deadline = 0.0
