"""A file that processes lock: a regular file of one name. A link, a pipe or a directory in its place is refused."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

_KINDS = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe"}


def open_lock_file(path: Path) -> IO[str]:
    """Open for reading and writing, created if absent; nothing is written. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _refused(path, os.lstat(path).st_mode) from None
        raise
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(handle)
        raise _refused(path, found.st_mode)
    return os.fdopen(handle, "r+")


def _refused(path: Path, mode: int) -> OSError:
    kind = _KINDS.get(
        stat.S_IFMT(mode), "a file with more than one hard link" if stat.S_ISREG(mode) else "not a regular file"
    )
    return OSError(errno.EINVAL, f"{path.name} is {kind}: remove it", str(path))
