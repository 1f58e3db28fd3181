"""The origin of a graph node in the user's code: module path and the deepest source line that is not PyTorch's."""

from __future__ import annotations

import linecache
import os
import re
from functools import lru_cache
from pathlib import Path
from types import CodeType

import torch
from torch import fx

from passes.errors import Where

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = tuple(
    os.path.join(str(Path(__file__).absolute().parents[2]), d) + os.sep for d in ("planner", "passes", "runtime")
)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')


@lru_cache(maxsize=4096)
def is_foreign_frame(filename: str) -> bool:
    """Whether a frame belongs to PyTorch, to us or to generated code, and so is of no use to a user."""
    return filename.startswith((_TORCH, "<", *_OURS)) or "eval_with_key" in filename


def module_of(node: fx.Node) -> str:
    """Dotted path of the innermost module with the forward that made the node; "" at the top."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    return str(path).removeprefix("L['self'].")


def frames_of(node: fx.Node) -> tuple[tuple[str, int], ...]:
    """File and line of each frame of the user's code that led to a node, the outermost first."""
    frames = _FRAME.finditer(node.meta.get("stack_trace") or "")
    return tuple((m["file"], int(m["line"])) for m in frames if not is_foreign_frame(m["file"]))


def lines_of(node: fx.Node) -> tuple[int, ...]:
    """The lines alone, by which calls can be ordered."""
    return tuple(line for _, line in frames_of(node))


def where_of_frame(code: CodeType, line: int) -> Where:
    """The source line of a frame that ran ``code``."""
    return Where("", code.co_filename, line, linecache.getline(code.co_filename, line).strip())


def where_of(node: fx.Node) -> Where:
    """Module and the user's source line of a node, as far as capture knows."""
    frames = [m for m in _FRAME.finditer(node.meta.get("stack_trace") or "") if not is_foreign_frame(m["file"])]
    if not frames:
        return Where(module=module_of(node))
    last = frames[-1]
    return Where(module=module_of(node), file=last["file"], line=int(last["line"]), code=last["code"].strip())
