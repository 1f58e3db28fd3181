"""The origin of a graph node in the user's code: module path and the deepest source line that is not PyTorch's."""

import inspect
import linecache
import os
import re
import sys
import traceback
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import fx

from passes.errors import Where

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = tuple(
    os.path.join(str(Path(__file__).absolute().parents[2]), d) + os.sep for d in ("planner", "passes", "runtime")
)
_GENERATED = "eval_with_key"  # in the file names of the code of graphs
_CALL = re.compile(r"\s*(?P<name>\w+)\b[^=(]* = ")  # a line of it
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')


@lru_cache(maxsize=4096)
def is_foreign_frame(filename: str) -> bool:
    """Return whether a frame belongs to PyTorch, to us or to generated code, and so is of no use to a user."""
    return filename.startswith((_TORCH, "<", *_OURS)) or _GENERATED in filename


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
    """Return the lines alone, by which calls can be ordered."""
    return tuple(line for _, line in frames_of(node))


def where_of_frame(code: CodeType, line: int, module: str = "") -> Where:
    """Return the source line of a frame that ran ``code``."""
    return Where(module, code.co_filename, line, linecache.getline(code.co_filename, line).strip())


def code_of(function: Any) -> CodeType | None:
    """That of a function, of one in a partial or a decorator, or of an object that is called; None if it is of C."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    called = getattr(type(function), "__call__", None)  # noqa: B004
    return getattr(function, "__code__", None) or getattr(called, "__code__", None)


def where_of_definition(function: Any, module: str = "") -> Where | None:
    """Return the line at which a function begins."""
    code = code_of(function)
    return None if code is None else where_of_frame(code, code.co_firstlineno, module)


def users_frame() -> tuple[CodeType, int] | None:
    """Return the code and the line of the user's innermost frame that is running now."""
    frames = ((frame.f_code, line) for frame, line in traceback.walk_stack(sys._getframe(1)))
    return next((site for site in frames if not is_foreign_frame(site[0].co_filename)), None)


def origin_of(node: fx.Node) -> dict[str, Any]:
    """The part of a node's meta that says where it comes from: for the calls that replace it, or stand beside it."""
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}


def where_of(node: fx.Node) -> Where:
    """Return the module and the user's source line of a node, as far as capture knows."""
    frames = [m for m in _FRAME.finditer(node.meta.get("stack_trace") or "") if not is_foreign_frame(m["file"])]
    if not frames:
        return Where(module=module_of(node))
    last = frames[-1]
    return Where(module=module_of(node), file=last["file"], line=int(last["line"]), code=last["code"].strip())


def origin_above(node: fx.Node) -> fx.Node:
    """Return the node or, of one that capture does not know, the nearest of its first inputs that it knows."""
    known = node
    while not (module_of(known) or known.meta.get("stack_trace")):
        if not known.all_input_nodes:
            return node
        known = known.all_input_nodes[0]
    return known


def where_failed(graph: fx.Graph, error: BaseException) -> Where | None:
    """Return the user's line of the call that raised ``error`` in the code of ``graph``; None if that is not known."""
    nodes = {node.name: node for node in graph.nodes}
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        call = _CALL.match(linecache.getline(file, line)) if _GENERATED in file else None
        if call is not None and call["name"] in nodes:
            return where_of(origin_above(nodes[call["name"]]))
    return None
