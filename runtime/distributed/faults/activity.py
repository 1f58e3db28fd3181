"""The current activity of a rank's main thread: part of every failure and heartbeat.

The executor sets it before each action, the engine around each call: an assignment and a line of text in a page of
memory, some microseconds.

The page outlives the rank: heartbeats are up to a second old, and a step may be shorter. The launcher has passed the
page to the process, and watchers on this host have mapped it, so that the error about a killed rank names its last
action. The processes share it by a descriptor; it has no file name, and leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import inf
from multiprocessing import reduction
from pathlib import Path
from typing import Any, NamedTuple

from planner.pause_gc import frame_of
from planner.pipeline.schedule import Action

START, BETWEEN = "start", "between steps"
DENOMINATORS, FORWARD, LAST_SENDS, GRADIENTS, UPDATE = (
    "denominators",
    "forward",
    "last sends",
    "sum of gradients",
    "update",
)
BATCH, SEARCH = "batch", "search for NaN and Inf"  # calls of an engine, as errors name them
_OF_THE_NEXT_STEP = (BATCH, UPDATE)
WORDS = {"F": "forward", "B": "backward", "W": "gradients of weights"}  # of the kinds of actions
_OURS = tuple(str(Path(__file__).resolve().parents[3] / name) for name in ("runtime", "passes"))
_SLOT = 1024
_SIZE = 2 * _SLOT + 1


class Now(NamedTuple):
    """An activity. ``step`` counts from 0. ``since``: seconds of the monotonic clock."""

    phase: str
    step: int
    since: float
    stage: int | None = None
    action: Action | None = None


class Activity:
    """The current activity of this rank. ``is_failing``: the main thread is leaving its call with an error.

    Texts number steps as the log does, from 1: the current step, or the last one between steps.
    ``listener``: called on each change, in the main thread.
    """

    def __init__(self, rank: int = 0, coordinate: Mapping[str, int] | None = None) -> None:
        self.name_after(rank, coordinate)
        self.is_failing = False
        self.page: Page | None = None
        self.listener: Callable[[Now], None] | None = None
        self.now = Now(START, 0, time.monotonic())
        self._must_end = inf  # deadline of a call of the user's code, by the monotonic clock
        self._ahead = 0  # number of the step in the log minus ``step``
        self._thread = threading.get_ident()

    def name_after(self, rank: int, coordinate: Mapping[str, int] | None) -> None:
        self.rank = rank
        place = " · ".join(f"{axis} {i}" for axis, i in (coordinate or {}).items())
        self.name = f"rank {rank}" + (f" ({place})" if place else "")

    def begin(self, phase: str, step: int) -> None:
        self.is_failing = False
        self._ahead = int(phase in _OF_THE_NEXT_STEP)
        self._set(Now(phase, step, time.monotonic()))

    def rest(self) -> None:
        """Note that the call has returned."""
        self.off(BETWEEN)

    def at(self, step: int, stage: int, action: Action) -> None:
        if self.now.phase == SEARCH:  # it repeats a step that was made
            self._ahead = 1
        self._set(Now(self.now.phase, step, time.monotonic(), stage, action))

    def off(self, phase: str) -> None:
        """Note a phase of the same step without an action."""
        self._set(Now(phase, self.now.step, time.monotonic()))

    @contextmanager
    def in_users_code(self, limit: timedelta) -> Iterator[None]:
        """Run a call of the user's code with a time limit: if it hangs on all ranks, no rank waits for another, and
        only the limit detects it.
        """
        self._must_end = time.monotonic() + limit.total_seconds()
        try:
            yield
        finally:
            self._must_end = inf

    @property
    def is_late(self) -> bool:
        """Whether a call of the user's code has exceeded its limit."""
        return time.monotonic() > self._must_end

    def _set(self, now: Now) -> None:
        self.now = now
        if self.page is not None:
            self.page.write(str(self))
        if self.listener is not None:
            self.listener(now)

    @property
    def is_engaged(self) -> bool:
        """Whether the main thread is in a call that other ranks take part in."""
        return self.now.phase != BETWEEN and not self.is_failing

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.now.since

    def __str__(self) -> str:
        """``rank 2 (tp 0 · pp 1 · dp 0), stage 1, step 5, microbatch 3, forward (F3.0)``"""
        now, number = self.now, self.now.step + self._ahead
        if now.action is None:
            return f"{self.name}, step {number}, {now.phase}" if now.phase != START else f"{self.name}, start"
        return (
            f"{self.name}, stage {now.stage}, step {number}, "
            f"microbatch {now.action.microbatch}, {WORDS[now.action.kind]} ({now.action})"
        )

    def line(self) -> tuple[str, bool]:
        """Return the main thread's current Python line, and whether it waits there for other ranks.

        The only long calls of the runtime and the passes are collectives: a thread that stays there is waiting.
        """
        frame = frame_of(self._thread)
        if frame is None:
            return "", False
        file = frame.f_code.co_filename
        waits = file.startswith(_OURS) or "torch/distributed" in file
        return f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}", waits


_own: Page | None = None


def own_page() -> Page | None:
    """Return the page of this process, for all its engines; None if this system has no unnamed memory."""
    global _own
    if _own is None:
        with suppress(OSError):
            _own = Page()
    return _own


def use(page: Page) -> None:
    """Use ``page``, which the launching process also reads, as the page of this process."""
    global _own
    _own = page


class SharedFile:
    """An unnamed file, shared with processes that get it at their start; freed once all have closed it."""

    LABEL = "meshwright"

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = unnamed_memory(self.LABEL) if descriptor is None else descriptor

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pass the file to another process at its start."""
        return _received, (type(self), reduction.DupFd(self.descriptor))  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        os.close(self.descriptor)


def _received(kind: type[SharedFile], duplicate: Any) -> SharedFile:
    return kind(duplicate.detach())


class Page(SharedFile):
    """A page of memory: two slots of text, and the index of the complete one."""

    LABEL = "meshwright-place"

    def __init__(self, descriptor: int | None = None, memory: mmap.mmap | None = None) -> None:
        super().__init__(descriptor)
        if descriptor is None:
            os.ftruncate(self.descriptor, _SIZE)
        self._memory = mmap.mmap(self.descriptor, _SIZE) if memory is None else memory

    @classmethod
    def of(cls, pid: int, descriptor: int) -> Page | None:
        """Return the page of another process of this host, for reading; None if it is gone or not readable."""
        if descriptor < 0:
            return None
        with suppress(OSError, ValueError), open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
            return cls(-1, mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ))
        return None

    def write(self, text: str) -> None:
        slot = 1 - self._memory[2 * _SLOT]
        content = text.encode()[: _SLOT - 1] + b"\0"
        self._memory[slot * _SLOT : slot * _SLOT + len(content)] = content
        self._memory[2 * _SLOT] = slot

    def read(self) -> str:
        slot = self._memory[2 * _SLOT] * _SLOT
        return self._memory[slot : slot + _SLOT].partition(b"\0")[0].decode(errors="replace")


def unnamed_memory(label: str) -> int:
    """Return the descriptor of unnamed memory, which does not depend on a full disk; of an unnamed file if a sandbox
    refuses ``memfd_create``. Raises OSError if both are refused.
    """
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create(label)
        except OSError:
            pass
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
