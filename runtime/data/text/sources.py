"""Which files a source names, in an order that does not change."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from passes.errors import PlanError
from planner.files.text import is_directory, is_file, shorten

STDLIB = "stdlib"
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"})


def files_of(source: str, option: str = "--data") -> list[Path]:
    """A file, a directory's files in sorted order, or those of Python's library for ``stdlib``. Raises PlanError."""
    if source == STDLIB:
        library = Path(sysconfig.get_path("stdlib"))
        found = library.rglob("*.py")
        return sorted(file for file in found if not _LEFT_OUT.intersection(file.relative_to(library).parts))
    path = Path(source)
    if is_file(path):
        return [path]
    if is_directory(path):
        return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    raise PlanError(
        f"no file or directory {shorten(source)}", where=option, fix="give a text file or directory, or stdlib"
    )
