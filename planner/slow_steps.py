"""Say what long work is at: a line on stderr for each step that takes more than some seconds, and one when it ends.

capturing the model …
capturing the model: 8.4 s
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

AFTER_SECONDS = 3.0


@contextmanager
def shown_if_slow(what: str, *, after_seconds: float = AFTER_SECONDS) -> Iterator[None]:
    """Around a step called ``what``; silent where it is quick, and on every rank but the first."""
    start = time.monotonic()
    told = threading.Event()

    def tell() -> None:
        told.set()
        _say(f"{what} …")

    timer = threading.Timer(after_seconds, tell)
    timer.daemon = True
    if os.environ.get("RANK", "0") == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if told.is_set():
            _say(f"{what}: {time.monotonic() - start:.1f} s")


def _say(line: str) -> None:
    """To the real stderr: torch.export runs with another in its place."""
    stream = sys.__stderr__
    if stream is not None:
        stream.write(f"{line}\n")
        stream.flush()
