"""Replace a directory at once: whoever looks, and whatever is killed, sees the old one or the new one.

write  .name.….partial beside it  ->  sync  ->  exchange the two names  ->  delete the old
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def replaced_directory(directory: Path, is_stale: Callable[[str], bool]) -> Iterator[Path]:
    """An empty directory beside ``directory``, which takes its place when the block ends well, else nothing changes.

    Files of the old directory that the block did not write stay, except those whose name ``is_stale``. What earlier,
    killed attempts left behind is removed. Raises OSError.
    """
    target = Path(os.path.realpath(directory))
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "there is a file of this name, not a directory", str(directory))
    target.parent.mkdir(parents=True, exist_ok=True)
    for left_over in target.parent.glob(f".{target.name}.*.partial"):
        shutil.rmtree(left_over, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        new.chmod(target.stat().st_mode & 0o7777 if target.exists() else 0o777 & ~_umask())
        yield new
        if target.exists():
            _keep_others(target, new, is_stale)
        sync(new)
        _take_place(new, target)
        sync(target.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # the unfinished one, or after the exchange the old one


def sync(path: Path) -> None:
    """Have a file or directory on the disk before what comes next."""
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
    """The same file under a second name where the file system can, else a copy."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _take_place(new: Path, target: Path) -> None:
    if not target.exists():
        new.rename(target)
    elif not _exchange(new, target):
        # No exchange here (some network file systems): between the two renames the old one has another name.
        aside = new.with_name(new.name.removesuffix(".partial") + ".old")
        target.rename(aside)
        new.rename(target)
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    done = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0
    if not done and ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(second))
    return done


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
