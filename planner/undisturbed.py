"""While a plan is made, nothing looks at the frames of the thread that makes it, and nothing looks for garbage.

A frame that another thread holds keeps what its function has made, and lets go of it later, in that thread: where this
happens to a tensor that torch.export follows, the export takes it for a constant (seen on torch 2.13, in one capture
of fifteen beside a thread that looks every half a millisecond). Looking for garbage among the nodes of graphs takes a
fifth of the time of a plan.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_planning: dict[int, int] = {}  # thread → plans that it is at, one inside of another


@contextmanager
def undisturbed() -> Iterator[None]:
    """Around the making of a plan."""
    thread, collects = threading.get_ident(), gc.isenabled()
    _planning[thread] = _planning.get(thread, 0) + 1
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        _planning[thread] -= 1
        if not _planning[thread]:
            del _planning[thread]


def is_planning(thread: int) -> bool:
    """Whether the frames of ``thread`` must not be looked at."""
    return thread in _planning


def frame_of(thread: int) -> FrameType | None:
    """Where ``thread`` is in its code; None where it plans, or has ended."""
    return None if is_planning(thread) else sys._current_frames().get(thread)
