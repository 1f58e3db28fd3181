"""Returns freed memory to the system: glibc keeps its pages, between those in use, for the process.

Building a model on the meta device and making a plan free much memory in small pieces, and a rank frees the user's
model once its shards are copied. A step allocates large pieces, which fit into few of these gaps.
"""

from __future__ import annotations

import ctypes


def give_back_freed() -> None:
    """Return the pages of every gap, in a few milliseconds; does nothing if the C library is not glibc."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # of macOS, musl, Windows
        return
    trim(0)
