"""Forward SIGTERM, SIGUSR1 and Ctrl-C to launched ranks, which then have some time to finish.

first signal     SIGTERM to every rank; a rank with a handler finishes its step, saves and returns
a second one, or ``grace_seconds`` later    the ranks are ended
"""

from __future__ import annotations

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

from runtime.distributed.stopping import SIGNALS


class Forwarding:
    """Owns the handlers of these signals, in the main thread and inside of ``with``; elsewhere it does nothing."""

    def __init__(self, pids: Callable[[], Iterable[int]], grace_seconds: float) -> None:
        """``pids``: the ranks that run now."""
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
        """To ranks that started after the signal came."""
        for pid in self._pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def end(self) -> None:
        """After ``with``: apply the signal's own effect to this process. Raises KeyboardInterrupt or SystemExit."""
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
