"""Files of a directory that may come from anyone: only regular ones are opened, and none grows memory without a limit.

A FIFO would block for ever, a device never ends, and a link may lead out of the directory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import xxhash

from passes.errors import PlanError

_CHUNK = 4 << 20


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file for reading. Raises PlanError, naming it, for anything else, and if the disk fails."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise cannot_read(path, error) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise PlanError(f"{path.name} is not a regular file", where=str(path), fix="load another save")
    with os.fdopen(handle, "rb") as file:
        try:
            yield file
        except OSError as error:
            raise cannot_read(path, error) from None


def read_small(path: Path, most: int) -> bytes:
    """All of a file of at most ``most`` bytes. Raises PlanError."""
    with opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise PlanError(f"{path.name} has more than {most:,} bytes", where=str(path), fix="load another save")
    return content


def check_size(path: Path, num_bytes: int) -> None:
    """Raise PlanError, naming the file, unless it has the size that was written."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != num_bytes:
        raise PlanError(
            f"{path.name} has {size:,} bytes, but {num_bytes:,} were written", where=str(path), fix="load another save"
        )


def check_whole(path: Path, num_bytes: int, checksum: str) -> None:
    """Read all of a file. Raises PlanError, naming it, unless its size and checksum are those that were written."""
    check_size(path, num_bytes)
    digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK))
    with opened(path) as file:
        while count := file.readinto(chunk):  # pyright: ignore[reportAttributeAccessIssue]
            digest.update(chunk[:count])
    if digest.hexdigest() != checksum:
        raise PlanError(
            f"{path.name} is damaged or belongs to another save: its checksum does not match",
            where=str(path),
            fix="load another save",
        )


def cannot_read(path: Path, error: OSError | ValueError) -> PlanError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return PlanError(f"cannot read {path.name[:200]}: {reason}", where=str(path)[:1000], fix="load another save")
