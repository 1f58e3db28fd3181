"""Turns off the garbage collector while a plan is made, and keeps other threads from reading the frames of its thread.

Another thread that holds a frame keeps the objects of its function alive, and frees them later. If one of them is a
tensor that torch.export follows, the export takes it for a constant (seen on torch 2.13, in one capture of fifteen
beside a thread that reads frames every half a millisecond). Garbage collection among the nodes of graphs takes a fifth
of the time of a plan.
"""

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_planning: dict[int, int] = {}  # thread → number of nested plans that it is making
_collector_lock = threading.Lock()
_collector_found: list[bool] = []  # whether the collector was on before the first of these plans


def _begin(thread: int) -> None:
    with _collector_lock:
        if not _planning:
            _collector_found.append(gc.isenabled())
            gc.disable()
        _planning[thread] = _planning.get(thread, 0) + 1


def _end(thread: int) -> None:
    """Restore the collector after the last plan of all threads, which share it."""
    with _collector_lock:
        _planning[thread] -= 1
        if not _planning[thread]:
            del _planning[thread]
        if not _planning and _collector_found.pop():
            gc.enable()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Turn off the garbage collector while a plan is made in this thread."""
    thread = threading.get_ident()
    _begin(thread)
    try:
        yield
    finally:
        _end(thread)


def is_planning(thread: int) -> bool:
    """Return whether ``thread`` is making a plan, so that its frames must not be read."""
    return thread in _planning


def frame_of(thread: int) -> FrameType | None:
    """Return the frame of ``thread``; None if it is making a plan or has ended."""
    return None if is_planning(thread) else sys._current_frames().get(thread)
