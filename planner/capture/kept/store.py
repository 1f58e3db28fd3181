"""The directory of kept captures: only its owner can write there, and nothing that is read from it can run.

    $MESHWRIGHT_CACHE/captures, else $XDG_CACHE_HOME/meshwright/captures, else ~/.cache/meshwright/captures
    KEY.capture      the digest of the rest, then a safetensors file: the constants, and the program as JSON
    KEY.lock         held by the process that captures; others of the host wait for it

A directory or file of another user, one that others may write to, or a link in its place raises OSError.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from planner.files.atomic import PARTIAL, replaced_file
from planner.files.lock_file import open_lock_file

VARIABLE = "MESHWRIGHT_CACHE"
_FORM = b"meshwright capture 1 "
_MOST_FILES, _MOST_BYTES, _MOST_BYTES_OF_ALL = 64, 1 << 30, 4 << 30
_SPARE_AFTER_SECONDS = 86_400
_WAIT_SECONDS, _POLL_SECONDS = 600.0, 0.05

Kept = tuple[dict[str, Any], dict[str, Tensor]]


def place_of() -> Path | None:
    """The directory of captures, even if absent; None with MESHWRIGHT_CACHE=0."""
    asked = os.environ.get(VARIABLE)
    if asked == "0":
        return None
    return (Path(asked).absolute() if asked else _cache_home() / "meshwright") / "captures"


def _cache_home() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return Path(given) if os.path.isabs(given) else Path(os.path.expanduser("~")) / ".cache"


def make(place: Path) -> None:
    """Create the directory if it is absent. Raises OSError if it, or the one above, is not the owner's alone."""
    place.parent.parent.mkdir(parents=True, exist_ok=True)
    for directory in (place.parent, place):
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        _check_own(directory, os.lstat(directory), stat.S_ISDIR)


def _check_own(path: Path, status: os.stat_result, is_kind: Any) -> None:
    if not is_kind(status.st_mode):
        raise OSError(errno.EINVAL, "a link or another kind of file lies there", str(path))
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise OSError(errno.EPERM, "others can write to it", str(path))


def read(place: Path, key: str) -> Kept | None:
    """The capture kept under ``key``; None if there is none. Raises OSError, and ValueError if it is damaged."""
    path = place / f"{key}.capture"
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(handle, "rb") as file:
        _check_own(path, os.fstat(handle), stat.S_ISREG)
        if os.fstat(handle).st_size > _MOST_BYTES:
            raise ValueError("the file is too large")
        head, _, content = file.read().partition(b"\n")
        with suppress(OSError):
            os.utime(handle)  # those that are read stay longest
    if head != _FORM + hashlib.sha256(content).hexdigest().encode():
        raise ValueError("its digest is another")
    try:
        length = int.from_bytes(content[:8], "little")
        program = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["program"])
        return program, {name: value.clone() for name, value in load(content).items()}  # a view could not be detached
    except (KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise ValueError(str(error)) from error


def write(place: Path, key: str, program: dict[str, Any], constants: dict[str, Tensor]) -> None:
    """Writes atomically; the oldest captures make room. Raises OSError."""
    content = save(constants, metadata={"program": json.dumps(program)})
    if len(content) >= _MOST_BYTES:
        raise OSError(errno.EFBIG, "the capture is too large", str(place))
    with replaced_file(place / f"{key}.capture") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(_FORM + hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    _prune(place)


def _prune(place: Path) -> None:
    """Remove the oldest captures, and locks and partial files that were not touched for a day."""
    left = _MOST_BYTES_OF_ALL
    for number, path in enumerate(sorted(place.glob("*.capture"), key=lambda path: -path.lstat().st_mtime_ns)):
        left -= path.lstat().st_size
        if number >= _MOST_FILES or left < 0:
            path.unlink(missing_ok=True)
    for path in place.iterdir():
        if path.suffix in (".lock", PARTIAL) and time.time() - path.lstat().st_mtime > _SPARE_AFTER_SECONDS:
            path.unlink(missing_ok=True)


def kept_in(place: Path) -> list[Path]:
    """The files of captures. Raises OSError if the directory is not the owner's."""
    if not os.path.lexists(place):
        return []
    _check_own(place, os.lstat(place), stat.S_ISDIR)
    return sorted(place.glob("*.capture"))


@contextmanager
def alone(place: Path, key: str) -> Iterator[None]:
    """One process of the host at a time, for ``key``; after ten minutes, or if files cannot be locked, each for
    itself. Raises OSError if the lock cannot be made."""
    with open_lock_file(place / f"{key}.lock") as file:  # the lock ends with the file, even if the process is killed
        end = time.monotonic() + _WAIT_SECONDS
        while not _is_locked(file.fileno()) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        yield


def _is_locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True
