"""Replaces a directory atomically: a reader sees the old one or the new one, even if the writer is killed.

    write  .name.….partial beside it  ->  sync  ->  exchange the two names  ->  delete the old

New files are moved one by one instead if the names cannot be exchanged: for a mount point (a container's volume), the
working directory (open shells would stay in a deleted one), a directory that may not be renamed, and a file system
without the exchange. Each file is then the old or the new one, and the index that lists them moves last: a killed run
leaves the old set, the new set, or a set that is rejected, never a mixture that loads.
"""

import ctypes
import errno
import fcntl
import glob
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from passes.errors import PlanError
from planner.files.atomic import MOST_LETTERS, PARTIAL, name_beside

FIX = "use a writable directory with space for the weights"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def replaced_directory(
    directory: Path, is_stale: Callable[[str], bool], is_index: Callable[[str], bool] = lambda name: False
) -> Iterator[Path]:
    """Yield an empty directory, which replaces ``directory`` at the end of the block; on an error nothing changes.

    Files of the old directory that the block did not write stay, except those with a name that ``is_stale``. A file
    with a name that ``is_index`` lists others that belong together. Remains of earlier, killed attempts are removed.
    Raises OSError, and PlanError if another process is replacing the directory.
    """
    target = Path(os.path.realpath(directory))
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file has this name; a directory is needed", str(directory))
    target.parent.mkdir(parents=True, exist_ok=True)
    stays = target.exists() and _must_stay(target)
    with _own_place(target, target if stays else target.parent) as new:
        if target.exists():
            new.chmod(target.stat().st_mode & 0o7777)
        yield new
        written = sorted(path.name for path in new.iterdir())
        sync(new)
        if not target.exists():
            new.rename(target)
        else:
            if not stays:
                _keep_others(target, new, is_stale)
                sync(new)
            if stays or not _exchange(new, target):
                _move_into(new, target, written, is_stale, is_index)
                return
        sync(target.parent)


@contextmanager
def _own_place(target: Path, parent: Path) -> Iterator[Path]:
    """Yield a new directory in ``parent``, which this process locks; the lock ends with the process."""
    _clear_left_overs(target, parent)
    new = name_beside(parent / target.name)
    new.mkdir()  # the kernel applies the umask
    handle = _locked(new)
    try:
        if handle is None:
            raise _is_busy(target)
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)  # the unfinished directory; after the exchange, the old one
        if handle is not None and handle >= 0:
            os.close(handle)


def _clear_left_overs(target: Path, parent: Path) -> None:
    """Remove the remains of killed attempts. Raises PlanError if an attempt is alive, which holds its lock."""
    for left_over in parent.glob(f".{glob.escape(target.name[:MOST_LETTERS])}.*{PARTIAL}"):
        handle = _locked(left_over)
        if handle is None:
            raise _is_busy(target)
        shutil.rmtree(left_over, ignore_errors=True)
        if handle >= 0:
            os.close(handle)


def _locked(directory: Path) -> int | None:
    """Lock a directory and return the descriptor; None if another process holds the lock, -1 without locks."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None  # another process removed it as remains
    except OSError:
        return -1
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        os.close(handle)
        return -1
    return handle


def _is_busy(target: Path) -> PlanError:
    what = "another process is writing to this directory"
    return PlanError(what, where=str(target), fix="wait for its end, or use another directory")


def _must_stay(target: Path) -> bool:
    """Return whether the directory cannot, or should not, be renamed."""
    here = Path(os.path.realpath(os.curdir))
    return here.is_relative_to(target) or is_mount_point(target) or not os.access(target.parent, os.W_OK | os.X_OK)


def is_mount_point(path: Path) -> bool:
    """Return whether a path is a mount point; also for a bind mount of the same file system (a container's volume)."""
    if os.path.ismount(path):
        return True
    with suppress(OSError):
        mounts = Path("/proc/self/mountinfo").read_bytes().splitlines()
        name = os.fsencode(path).replace(b" ", b"\\040")
        return any(line.split(b" ")[4] == name for line in mounts if line.count(b" ") > 4)
    return False


def sync(path: Path) -> None:
    """Sync a file or directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _keep_others(old: Path, new: Path, is_stale: Callable[[str], bool]) -> None:
    for entry in old.iterdir():
        if (new / entry.name).exists() or is_stale(entry.name):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, new / entry.name, symlinks=True, copy_function=_link)
        else:
            _link(entry, new / entry.name)


def _link(source: str | Path, target: str | Path) -> None:
    """Link a file under a second name; copy it if the file system cannot link."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _move_into(
    new: Path, target: Path, written: list[str], is_stale: Callable[[str], bool], is_index: Callable[[str], bool]
) -> None:
    """Move file by file: remove an old index that would list new files, move files, then the index, then remove stale
    files.
    """
    others, indices = [n for n in written if not is_index(n)], [n for n in written if is_index(n)]
    old = [path.name for path in target.iterdir() if is_stale(path.name)]
    if set(others) & set(old):
        for name in filter(is_index, old):
            (target / name).unlink()
        sync(target)
    for names in (others, indices):
        for name in names:
            os.replace(new / name, target / name)
        sync(target)
    for name in old:
        if name not in written:
            (target / name).unlink(missing_ok=True)
    sync(target)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; return False if the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    done = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0
    cannot = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EBUSY, errno.EXDEV, errno.EACCES)
    if not done and ctypes.get_errno() not in cannot:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(second))
    return done
