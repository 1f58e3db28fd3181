"""Our own sources as one hash, and the files that Python reads meanwhile."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

_HOUSES = Path(__file__).resolve().parents[3]
_OUR_ROOTS = tuple(str(_HOUSES / name) + os.sep for name in ("planner", "passes", "runtime", "specs"))
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "scripts"))
_NO_FILES = ("/proc/", "/sys/", "/dev/")
_METADATA = (".dist-info", ".egg-info")  # the ends of directories

_reading: list[set[str]] = []  # of those that watch now


@contextmanager
def files_read() -> Iterator[set[str]]:
    """Inside, the files that Python opens to read, other than those of installed packages and our own."""
    _watch_files()
    _reading.append(found := set())
    try:
        yield found
    finally:
        _reading[:] = [other for other in _reading if other is not found]


@lru_cache(1)
def _watch_files() -> None:
    sys.addaudithook(_note_opened)  # for good: a hook cannot be taken back


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _reading and isinstance(arguments[0], (str, bytes)) and not _makes(arguments[2]):
        path = os.path.abspath(os.fsdecode(arguments[0]))
        is_of_imports = path.endswith(".pyc") or path in sys.path  # an archive that may lie there, with modules in it
        is_known = _is_installed(path) or _is_metadata(path)
        if not (is_of_imports or is_known or path.startswith((*_OUR_ROOTS, *_NO_FILES))):
            for found in _reading:
                found.add(path)


def _makes(flags: Any) -> bool:
    """Whether nothing is read that lay there before."""
    return isinstance(flags, int) and bool(flags & (os.O_EXCL | os.O_TRUNC | os.O_WRONLY))


def _is_installed(path: str) -> bool:
    return "/site-packages/" in path or "/dist-packages/" in path or path.startswith(_INSTALLED)


def _is_metadata(path: str) -> bool:
    """Whether ``importlib.metadata`` finds an installed package by it: a checkout on the path may have one."""
    of_package = Path(path).parent
    return of_package.name.endswith(_METADATA) and str(of_package.parent) in map(os.path.abspath, sys.path)


@lru_cache(1)
def our_sources() -> str:
    found = hashlib.sha256()
    for path in sorted(path for house in ("planner", "passes") for path in (_HOUSES / house).rglob("*.py")):
        content = path.read_bytes()
        found.update(f"{path.relative_to(_HOUSES)}:{len(content)}:".encode() + content)
    return found.hexdigest()
