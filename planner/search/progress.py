"""Progress of a search: one line on stderr, only in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from planner.slow_steps import shown_by


@contextmanager
def shown_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A function that gets the current work, the number of finished items, and their total (0: unknown)."""
    console = Console(stderr=True)
    if not (sys.stderr.isatty() and console.is_terminal):
        yield lambda what, done, total: None
        return
    with console.status("searching") as status, shown_by(lambda line: status.update(escape(line))):

        def show(what: str, done: int, total: int) -> None:
            count = f" {done} of {total}" if total else f" {done}" if done else ""
            status.update(escape(f"{what}{count}"))

        yield show
