"""Writes files atomically: readers see the old content or the new one, even if the writing process is killed.

    write  .name.….partial beside it  ->  sync  ->  rename

The temporary name is random and must be new (O_EXCL, O_NOFOLLOW), so nothing is written through a link. Permissions
are those of the replaced file, else those of the umask.

A lock file must be a regular file with one name: a link, a pipe or a directory in its place is an error.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PARTIAL = ".partial"
MOST_LETTERS = 50  # of the file's name, so that the temporary name is not too long for the file system
_NOT_FILES = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe"}


def name_beside(path: Path) -> Path:
    """Return a new, unpredictable name in the directory of ``path``: ``.name.….partial``."""
    return path.with_name(f".{path.name[:MOST_LETTERS]}.{secrets.token_hex(8)}{PARTIAL}")


def open_new(path: Path) -> IO[bytes]:
    """Create a file and open it for writing and reading. Raises OSError; FileExistsError if the name is taken."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    return os.fdopen(os.open(path, flags, 0o666), "w+b")


def try_new_file(path: Path) -> None:
    """Create a file beside ``path`` and remove it. Raises OSError if ``path`` could not be written."""
    Replacement(path).discard()


def write_new(path: Path, content: bytes) -> None:
    """Create a file and sync its content to disk. Raises OSError; FileExistsError if the name is taken."""
    with open_new(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


class Replacement:
    """A new file beside ``path``, open as ``file``, until it replaces ``path`` or is removed. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path, self._beside, mode = path, name_beside(path), None
        with suppress(FileNotFoundError):  # a name that is too long must fail here, not when the file is complete
            there = os.lstat(path)
            mode = there.st_mode & 0o777 if stat.S_ISREG(there.st_mode) else None
        self.file = open_new(self._beside)
        with suppress(OSError):
            if mode is not None:
                os.fchmod(self.file.fileno(), mode)

    def take_place(self) -> None:
        """Sync the new file to disk and rename it to ``path``."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self._beside.replace(self.path)
        sync_directory(self.path.parent)

    def discard(self) -> None:
        """Remove the new file, unless it has replaced ``path``."""
        with suppress(OSError):
            self.file.close()
        with suppress(OSError):
            os.unlink(self._beside)


@contextmanager
def replaced_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a new file that replaces ``path`` when the block ends without an error. Raises OSError."""
    new = Replacement(path)
    try:
        yield new.file
        new.take_place()
    finally:
        new.discard()


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the file ``path`` atomically; a link is replaced, not followed. Raises OSError."""
    with replaced_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_for_user(path: Path, content: str | Iterable[str]) -> None:
    """Write to a user's path: follows links, and writes directly into a device or pipe. Raises OSError."""
    parts = (content,) if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with target.open("w", encoding="utf-8") as file:  # /dev/stdout, a pipe; a directory is an error
            file.writelines(parts)
    else:
        with replaced_file(target) as file:
            file.writelines(part.encode() for part in parts)


def sync_directory(directory: Path) -> None:
    """Sync the names of a directory to disk, if the file system supports it. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise
    finally:
        os.close(handle)


def open_lock_file(path: Path) -> IO[str]:
    """Open a lock file for reading and writing; creates it if absent. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _refused(path, os.lstat(path).st_mode) from None
        raise
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(handle)
        raise _refused(path, status.st_mode)
    return os.fdopen(handle, "r+")


def _refused(path: Path, mode: int) -> OSError:
    kind = _NOT_FILES.get(
        stat.S_IFMT(mode), "a file with more than one hard link" if stat.S_ISREG(mode) else "not a regular file"
    )
    return OSError(errno.EINVAL, f"{path.name} is {kind}: remove it", str(path))
