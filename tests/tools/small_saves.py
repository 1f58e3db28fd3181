"""A save of two tensors by one rank without an engine, and forks that die in the middle of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from passes.errors import PlanError
from planner.mesh import Mesh
from planner.sharding.boxes import Box
from runtime.checkpoint.lines import Line
from runtime.checkpoint.manifest import OptimizerEntry, draft
from runtime.checkpoint.pieces import WrittenPiece
from runtime.checkpoint.saver import Content, write_save
from runtime.checkpoint.saves import by_newest, verify
from runtime.distributed.groups import Groups
from tests.tools.limits import HANG_SECONDS

WRITES = ("open", "os.", "shutil.", "tempfile.", "ctypes.call_function")  # audit events of what changes a file system
KILLED = 9
LINE = Line(id="a" * 32)


def newest_intact(directory: Path) -> tuple[Path | None, list[PlanError]]:
    """The first save that a run can resume from, and why those before it are skipped."""
    candidates, skipped = by_newest(directory)
    for save in candidates:
        try:
            verify(save)
        except PlanError as error:
            skipped.append(error)
        else:
            return save, skipped
    return None, skipped


def content(step: int, value: float, line: Line = LINE) -> Content:
    """``value`` everywhere."""
    boxes = {"up": [Box((0, 0), (3, 4)), Box((3, 0), (5, 4))], "bias": [Box((0,), (7,))]}
    pieces = [
        WrittenPiece(name, kind, box, torch.full(box.shape, value))
        for name, held in boxes.items()
        for box in held
        for kind in ("parameter", "exp_avg", "exp_avg_sq")
    ]
    names: dict[str, tuple[str, ...]] = {"up": (), "bias": ()}
    manifest = draft(
        step=step,
        line=line,
        mesh={"tp": 1},
        order="tp-cp-ep-dp-pp",
        zero=1,
        seed=0,
        optimizer=OptimizerEntry(name="adamw", updates=step),
        loss_scale=None,
        texts={},
        extra={"value": value},
    )
    return Content(pieces, names, manifest)


def save(directory: Path, step: int, value: float, line: Line = LINE) -> str:
    groups = Groups(Mesh(), 0, torch.device("cpu"), timedelta(seconds=HANG_SECONDS))
    return write_save(groups, directory, content(step, value, line))


def num_operations(act: Callable[[], Any]) -> int:
    """How many operations on the file system ``act`` takes. In a fork: what watches stays."""
    seen = _counting(lambda _: None)
    act()
    return seen[0]


def die_before(number: int, act: Callable[[], Any]) -> None:
    """``act`` in a fork, which ends at once, as by kill -9, before its operation of that number."""
    child = os.fork()
    if child == 0:
        _counting(lambda count: os._exit(KILLED) if count == number else None)
        try:
            act()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == KILLED


def _counting(tell: Callable[[int], None]) -> list[int]:
    """Count what Python tells its auditors, and what it does not: writes come before each fsync, which is counted."""
    count = [0]

    def one_more() -> None:
        count[0] += 1
        tell(count[0])

    def audit(event: str, _: Any) -> None:
        if event.startswith(WRITES):
            one_more()

    real_sync, real_open = os.fsync, Path.open

    def sync(handle: int) -> None:
        one_more()
        real_sync(handle)

    def opened(path: Path, *args: Any, **kwargs: Any) -> Any:
        file = real_open(path, *args, **kwargs)
        if args[:1] == ("xb",):
            return _Counted(file, one_more)
        return file

    os.fsync, Path.open = sync, opened
    sys.addaudithook(audit)
    return count


class _Counted:
    """A file of which every write is an operation."""

    def __init__(self, file: Any, tell: Callable[[], None]) -> None:
        self._file, self._tell = file, tell

    def write(self, content: Any) -> int:
        self._tell()
        count = self._file.write(content)
        self._file.flush()
        return count

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
