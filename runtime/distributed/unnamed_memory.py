"""Memory that processes share by a descriptor, and that has no name in any directory: it leaves nothing behind."""

from __future__ import annotations

import os
import tempfile


def unnamed_memory(label: str) -> int:
    """A descriptor. Memory if the kernel supports it (a full disk does not affect that), else a file without a name: a
    sandbox may refuse ``memfd_create``. Raises OSError if it refuses both."""
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create(label)
        except OSError:
            pass
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
