"""Finds the user's line at which a call changes a value: checks after each line, once a refusal is certain."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from passes.errors import Where
from passes.program.source_lines import is_foreign_frame, where_of_frame


def line_that_changes(read: Callable[[], Any], run: Callable[[], Any]) -> Where | None:
    """The first line during ``run`` after which ``read`` gives something else; None if there is none."""
    found: list[tuple[Any, int]] = []
    last: list[tuple[Any, int]] = []
    before = read()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if found or is_foreign_frame(frame.f_code.co_filename):
            return None
        if last and read() != before:
            found.append(last[0])
            return None
        last[:] = [(frame.f_code, frame.f_lineno)]
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(outer)
    return where_of_frame(*found[0]) if found else None
