"""Show the progress of long work: a line on stderr when a step takes more than a few seconds, and one when it ends.

capturing the model …
capturing the model: 8.4 s

In a terminal the first line shows counts: capturing the model: 1200 ops …   loading weights: 12.3 GB, 1.9 GB/s …
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

AFTER_SECONDS = 3.0
_EVERY_SECONDS = 0.1
_CLEAR = "\r\x1b[K"


class _Step:
    """Owns the counts and the lines of one step."""

    def __init__(self, what: str) -> None:
        self.what, self.start, self.is_told = what, time.monotonic(), threading.Event()
        self._num_seen, self._num_bytes, self._next = 0, 0, 0.0

    def tell(self) -> None:
        self.is_told.set()
        say(f"{self.what} …")

    def end(self) -> None:
        if self.is_told.is_set():
            say(f"{self.what}: {self._amount()}{time.monotonic() - self.start:.1f} s")

    def see(self, items: str, num_bytes: int) -> None:
        self._num_seen += 1
        self._num_bytes += num_bytes
        now = time.monotonic()
        if not self.is_told.is_set() or now < self._next:
            return
        self._next = now + _EVERY_SECONDS
        _show(f"{self.what}: {self._amount().rstrip(', ') or f'{self._num_seen} {items}'} …")

    def _amount(self) -> str:
        """Return bytes and their rate as text, or "" if no bytes were counted."""
        rate = self._num_bytes / max(time.monotonic() - self.start, 1e-9)
        return f"{self._num_bytes / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s, " if self._num_bytes else ""


_step: ContextVar[_Step | None] = ContextVar("the slow step under way", default=None)
_shown_by: ContextVar[Callable[[str], None] | None] = ContextVar("the printer of progress in a terminal", default=None)


@contextmanager
def shown_if_slow(what: str, *, after_seconds: float = AFTER_SECONDS) -> Iterator[None]:
    """Show the step ``what`` if it takes longer than ``after_seconds``; only rank 0 prints."""
    step = _Step(what)
    timer = threading.Timer(after_seconds, step.tell)
    timer.daemon = True
    if _leads():
        timer.start()
    before = _step.set(step)
    try:
        yield
    finally:
        _step.reset(before)
        timer.cancel()
        step.end()


def see_one(items: str, num_bytes: int = 0) -> None:
    """Count one more of ``items`` in the current step, and the bytes that it read or wrote."""
    step = _step.get()
    if step is not None:
        step.see(items, num_bytes)


@contextmanager
def shown_by(show: Callable[[str], None]) -> Iterator[None]:
    """Pass counts to ``show`` instead of printing them, while it owns the last line of the terminal."""
    before = _shown_by.set(show)
    try:
        yield
    finally:
        _shown_by.reset(before)


def say(line: str) -> None:
    """Print a line on rank 0, to the original stderr, because torch.export replaces ``sys.stderr``."""
    stream = sys.__stderr__
    if stream is not None and _leads():
        stream.write(f"{_CLEAR if stream.isatty() else ''}{line}\n")
        stream.flush()


def _show(line: str) -> None:
    """Replace the line of the current step in the terminal."""
    stream, show = sys.__stderr__, _shown_by.get()
    if show is not None:
        show(line)
    elif stream is not None and stream.isatty():
        stream.write(_CLEAR + line)
        stream.flush()


def _leads() -> bool:
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def bar(what: str, total: int, *, of_bytes: bool = False, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a progress bar with the time left, in a terminal only; yields a function of the amount that was done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as SpeedColumn

    console = Console(stderr=True)
    counts = (DownloadColumn(), SpeedColumn()) if of_bytes else (MofNCompleteColumn(),)
    columns = TextColumn(what), BarColumn(), *counts, TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not (enabled and console.is_terminal)) as shown:
        task = shown.add_task(what, total=total)
        yield lambda done: shown.advance(task, done)
