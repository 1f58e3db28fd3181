"""Memory that was freed goes back to the system: glibc keeps its pages, between what still lives, for the process.

Building a model on the meta device and making a plan free much memory in small pieces, and a rank frees the user's
model once its shards are copied. A step allocates large pieces, which fit into few of these gaps.
"""

from __future__ import annotations

import ctypes


def give_back_freed() -> None:
    """A few milliseconds, in which the pages of every gap go back; nothing where the C library is not glibc."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # of macOS, musl, Windows
        return
    trim(0)
