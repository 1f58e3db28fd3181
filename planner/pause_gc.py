"""While a plan is made, nothing reads the frames of its thread, and the garbage collector is off.

A frame that another thread holds keeps its function's objects, and frees them later, in that thread: if this happens to
a tensor that torch.export follows, the export takes it for a constant (seen on torch 2.13, in one capture of fifteen
beside a thread that reads frames every half a millisecond). Garbage collection among the nodes of graphs takes a fifth
of the time of a plan.
"""

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_planning: dict[int, int] = {}  # thread → plans that it is at, one inside of another
_collector_lock = threading.Lock()
_collector_found: list[bool] = []  # whether it was on when the first of the plans now under way began


def _begin(thread: int) -> None:
    with _collector_lock:
        if not _planning:
            _collector_found.append(gc.isenabled())
            gc.disable()
        _planning[thread] = _planning.get(thread, 0) + 1


def _end(thread: int) -> None:
    """All threads share one collector: the last plan to end, in any thread, restores its state."""
    with _collector_lock:
        _planning[thread] -= 1
        if not _planning[thread]:
            del _planning[thread]
        if not _planning and _collector_found.pop():
            gc.enable()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Around the making of a plan."""
    thread = threading.get_ident()
    _begin(thread)
    try:
        yield
    finally:
        _end(thread)


def is_planning(thread: int) -> bool:
    """Whether the frames of ``thread`` must not be looked at."""
    return thread in _planning


def frame_of(thread: int) -> FrameType | None:
    """The frame of ``thread``; None if it is making a plan, or has ended."""
    return None if is_planning(thread) else sys._current_frames().get(thread)
