"""Whether a graph is being captured here and now: nothing is compiled meanwhile.

A compiler runs kernels, reads their times and takes memory, and a capture allows none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_IS_RECORDED: ContextVar[bool] = ContextVar("a recorded graph is being captured", default=False)


@contextmanager
def recording() -> Iterator[None]:
    """Around the capture of a graph that is recorded op by op."""
    token = _IS_RECORDED.set(True)
    try:
        yield
    finally:
        _IS_RECORDED.reset(token)


def is_capturing() -> bool:
    """Of a recorded graph, or of torch.cuda on the current stream."""
    return _IS_RECORDED.get() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
