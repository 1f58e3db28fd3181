"""Write a file atomically: a reader, and whatever is killed, sees the old content or the new one.

    write  .name.….partial beside it  ->  sync  ->  rename

The name beside is drawn at random and must be new (O_EXCL, O_NOFOLLOW): whatever lies there, such as a link, is never
written through. Permissions are those of the file that is replaced, else the umask's, which the kernel applies.

A file that processes lock is a regular file of one name: a link, a pipe or a directory in its place is refused.
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
MOST_LETTERS = 50  # of the name, so that the name beside is not too long for the file system
_NOT_FILES = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe"}


def name_beside(path: Path) -> Path:
    """A new, unpredictable name in the directory of ``path``: ``.name.….partial``."""
    return path.with_name(f".{path.name[:MOST_LETTERS]}.{secrets.token_hex(8)}{PARTIAL}")


def open_new(path: Path) -> IO[bytes]:
    """A file that was not there before, to be written and read. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    return os.fdopen(os.open(path, flags, 0o666), "w+b")


def try_new_file(path: Path) -> None:
    """Make a file beside ``path`` and remove it. Raises OSError if ``path`` could not be written."""
    Replacement(path).discard()


def write_new(path: Path, content: bytes) -> None:
    """The file is on the disk when it returns. Raises OSError; FileExistsError if the name is taken."""
    with open_new(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


class Replacement:
    """Owns a new file beside ``path``, open as ``file``, until it takes its place or is removed. Raises OSError."""

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
        """On the disk, and under its name, when it returns."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self._beside.replace(self.path)
        sync_directory(self.path.parent)

    def discard(self) -> None:
        """It is removed, unless it has taken its place."""
        with suppress(OSError):
            self.file.close()
        with suppress(OSError):
            os.unlink(self._beside)


@contextmanager
def replaced_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file, which takes the place of ``path`` when the block ends well, else nothing changes. Raises OSError."""
    new = Replacement(path)
    try:
        yield new.file
        new.take_place()
    finally:
        new.discard()


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the file ``path``, which is no link that is followed. Raises OSError."""
    with replaced_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_for_user(path: Path, content: str | Iterable[str]) -> None:
    """Write to a user's path: through a link of the user's own, and directly into a device or pipe. Raises OSError."""
    parts = (content,) if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with target.open("w", encoding="utf-8") as file:  # /dev/stdout, a pipe; a directory is an error
            file.writelines(parts)
    else:
        with replaced_file(target) as file:
            file.writelines(part.encode() for part in parts)


def sync_directory(directory: Path) -> None:
    """Have the names of a directory on the disk, on a file system that can. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise
    finally:
        os.close(handle)


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
    kind = _NOT_FILES.get(
        stat.S_IFMT(mode), "a file with more than one hard link" if stat.S_ISREG(mode) else "not a regular file"
    )
    return OSError(errno.EINVAL, f"{path.name} is {kind}: remove it", str(path))
