"""Memory that was freed goes back to the system: glibc keeps its pages, between what still lives, for the process.

Making a plan frees much in small pieces, and the user's model is let go of once its shards are copied. A step wants
large pieces, which fit into few of these gaps, so a rank would have both.
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
