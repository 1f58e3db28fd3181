"""Memory: the most that a rank has held (of its GPU by PyTorch's allocator, else resident), and that of its host."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_HOST = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")


def peak_bytes(device: torch.device) -> int:
    """Since the process began. No device is waited for."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) << 10
    except (OSError, StopIteration, ValueError):  # another system; there a child may count its parent's memory too
        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return found if sys.platform == "darwin" else found << 10


def available_bytes() -> int | None:
    """The host memory that a process can still allocate, within its container's limit too; None if not known."""
    try:
        line = next(line for line in _HOST.read_text().splitlines() if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # another system
        return None
    of_host = int(line.split()[1]) << 10
    try:
        limit, used = (int((_CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no container, or no limit
        return of_host
    return min(of_host, max(0, limit - used))
