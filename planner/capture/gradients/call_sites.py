"""Python's current line in the user's code, or the line that raised: module path, file and line. Source lines of
captured nodes are in passes.program.source_lines; this is for code that never becomes a node.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Iterable
from types import FrameType

from torch import nn

from passes.errors import Where
from passes.program.source_lines import is_foreign_frame


class CallSites:
    """Knows the modules of one model by name, to find the module of a frame.

    By their attributes: export replaces modules by stand-ins with the same ``__dict__`` if the model has shared ones.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(vars(module)): name for name, module in model.named_modules()}

    def here(self) -> Where:
        """The innermost line of the user that is running now."""
        frames: list[tuple[FrameType, int]] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            frames.append((frame, frame.f_lineno))
            frame = frame.f_back
        return self._innermost(reversed(frames))

    def frames_here(self) -> tuple[tuple[str, int], ...]:
        """File and line of each frame of the user's code that is running now, the outermost first."""
        found: list[tuple[str, int]] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if not is_foreign_frame(frame.f_code.co_filename):
                found.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        return tuple(reversed(found))

    def of(self, error: BaseException) -> Where:
        """The deepest frame of the traceback that is not PyTorch's own."""
        return self._innermost(traceback.walk_tb(error.__traceback__))

    def _innermost(self, outermost_first: Iterable[tuple[FrameType, int]]) -> Where:
        users = [(f, line) for f, line in outermost_first if not is_foreign_frame(f.f_code.co_filename)]
        if not users:
            return Where()
        held_by = [first for f, _ in reversed(users) if isinstance(first := _first_argument(f), nn.Module)]
        module = next((name for held in held_by if (name := self._names.get(id(vars(held)))) is not None), "")
        frame, line = users[-1]
        file = frame.f_code.co_filename
        return Where(module, file, line, linecache.getline(file, line).strip())


def _first_argument(frame: FrameType) -> object:
    """``self`` of a method, whatever it is called there."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def called_by_user(also: str = "") -> bool:
    """Whether the function that asks was called from a line of the user's, not from within PyTorch.

    ``also``: the end of the name of a file of PyTorch's that counts as the user's.
    """
    file = sys._getframe(2).f_code.co_filename
    return not is_foreign_frame(file) or bool(also and file.endswith(also))
