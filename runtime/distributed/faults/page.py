"""A page of memory in which a rank writes its activity before each action: it outlives the rank.

A heartbeat is up to a second old, and a step may be shorter. The launcher has passed the page to the process, and
watchers on this host have mapped it, so that the error about a killed rank names its last action. The
page has no name in any directory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import reduction
from typing import Any

from runtime.distributed.unnamed_memory import unnamed_memory

_SLOT = 1024
_SIZE = 2 * _SLOT + 1
_own: Page | None = None


def own_page() -> Page | None:
    """That of this process, for all its engines; None if this system has no memory without a name."""
    global _own
    if _own is None:
        with suppress(OSError):
            _own = Page.make()
    return _own


def use(page: Page) -> None:
    """Take ``page``, which the launching process reads too, as that of this process."""
    global _own
    _own = page


class Page:
    """Two slots of text, and which of them is complete."""

    def __init__(self, memory: mmap.mmap, descriptor: int = -1) -> None:
        self._memory, self.descriptor = memory, descriptor

    @classmethod
    def make(cls) -> Page:
        descriptor = unnamed_memory("meshwright-place")
        os.ftruncate(descriptor, _SIZE)
        return cls(mmap.mmap(descriptor, _SIZE), descriptor)

    def __reduce__(self) -> tuple[Callable[..., Page], tuple[Any, ...]]:
        """Passes the page to another process at its start."""
        return _received, (reduction.DupFd(self.descriptor),)  # pyright: ignore[reportAttributeAccessIssue]

    @classmethod
    def of(cls, pid: int, descriptor: int) -> Page | None:
        """That of another process of this host; None if it is gone, or not ours to read."""
        if descriptor < 0:
            return None
        with suppress(OSError, ValueError), open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
            return cls(mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ))
        return None

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def write(self, text: str) -> None:
        slot = 1 - self._memory[2 * _SLOT]
        content = text.encode()[: _SLOT - 1] + b"\0"
        self._memory[slot * _SLOT : slot * _SLOT + len(content)] = content
        self._memory[2 * _SLOT] = slot

    def read(self) -> str:
        slot = self._memory[2 * _SLOT] * _SLOT
        return self._memory[slot : slot + _SLOT].partition(b"\0")[0].decode(errors="replace")


def _received(duplicate: Any) -> Page:
    descriptor = duplicate.detach()
    return Page(mmap.mmap(descriptor, _SIZE), descriptor)


class Pages:
    """Owns the pages of the ranks that are watched, mapped while they lived."""

    def __init__(self) -> None:
        self._pages: dict[int, Page | None] = {}

    def map(self, rank: int, pid: int, descriptor: int) -> None:
        """Nothing if it is mapped, or could not be."""
        if rank not in self._pages:
            self._pages[rank] = Page.of(pid, descriptor)

    def last_of(self, rank: int, heard: str) -> str:
        """The last activity of ``rank``, to its last action; without a page ``heard``, from its last heartbeat."""
        page = self._pages.get(rank)
        return (page.read() if page is not None else "") or heard
