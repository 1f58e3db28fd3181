"""The most memory that a rank has held: of its GPU by PyTorch's allocator, else its process's resident memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


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
