"""Processes of this host as the kernel sees them: gone, stopped, or running however silent.

A process with a busy interpreter (parsing a large file, garbage collection) sends no heartbeats, but is alive.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Literal

State = Literal["gone", "stopped", "runs", "unknown"]


def host_key() -> str:
    """The same for two processes that see each other's numbers: one boot of one machine, one namespace of pids."""
    with suppress(OSError):
        return f"{boot_of_host()} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {os.getpid()}"  # nothing is known of others


def boot_of_host() -> str:
    """Identity of this machine since its start, unique among machines. Raises OSError if it is unknown."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_of(pid: int) -> str:
    """When the process started, in ticks of the machine: a number that is used again has another."""
    fields = _fields(pid)
    return fields[19] if fields else ""


def state_of(pid: int, start: str) -> State:
    if not start:
        return "unknown"
    fields = _fields(pid)
    if fields is None or fields[19] != start or fields[0] in "ZX":
        return "gone"
    return "stopped" if fields[0] in "Tt" else "runs"


def _fields(pid: int) -> list[str] | None:
    """From the state on: the name before it may hold blanks and brackets. None for no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()
