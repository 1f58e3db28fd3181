"""Files next to the log of a run: the trace of some of its steps, and the memory of its ranks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from passes.errors import PlanError
from planner.files.text import MIB, is_file, read_text, shorten
from runtime.report.memory_rows import ActionMemory, Compared, MemoryReport

LOG = ".jsonl"
_MOST_BYTES = 1024 * MIB
_MOVE = "write it again with this version, or move it away"


def trace_beside(log: Path) -> tuple[dict[str, Any], ...]:
    """The events of NAME.json beside NAME.jsonl, or of trace.json if only one log is beside it; else none.

    Raises PlanError for a file that is no JSON.
    """
    for path in _files(log, ".json", "trace.json"):
        events = _object(path, "trace").get("traceEvents")
        if isinstance(events, list):
            return tuple(event for event in events if isinstance(event, dict))
    return ()


def memory_beside(log: Path) -> MemoryReport | None:
    """The report that `meshwright memory --format json` printed into NAME.memory.json, or memory.json if only one log
    is beside it. Raises PlanError for a file that is none of this version.
    """
    for path in _files(log, ".memory.json", "memory.json"):
        values = _object(path, "report of memory")
        try:
            read = _adapter().validate_python(values)
        except ValidationError as error:
            first = error.errors()[0]
            told = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            words = f"this is not a memory report of this version: {shorten(told, 200)}"
            fix = f"{_MOVE}: meshwright memory MODEL SPEC --format json > {shorten(path.name)}"
            raise PlanError(words, where=shorten(path), fix=fix) from None
        return MemoryReport(tuple(read.rows), tuple(read.notes), tuple(read.actions))
    return None


class _Printed(BaseModel):
    rows: list[Compared]
    actions: list[ActionMemory]
    notes: list[str]


@cache
def _adapter() -> TypeAdapter[_Printed]:
    return TypeAdapter(_Printed)


def _files(log: Path, suffix: str, shared: str) -> list[Path]:
    """The existing files of both names. The second may be of any log: it counts only if there is one log."""
    is_alone = len(list(log.parent.glob(f"*{LOG}"))) == 1
    names = [log.with_suffix(suffix), *([log.with_name(shared)] if is_alone else [])]
    return [path for path in names if is_file(path)]


def _object(path: Path, what: str) -> dict[str, Any]:
    text = read_text(path, what, most_bytes=_MOST_BYTES, fix=_MOVE)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise PlanError(f"the {what} is damaged: it is not JSON", where=shorten(path), fix=_MOVE) from None
    return values if isinstance(values, dict) else {}
