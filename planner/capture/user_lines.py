"""Places in the user's code that torch.export does not record: for errors, and for source lines of nodes.

    CallSites             the line that runs now, or that raised: of code that never becomes a node
    line_that_changes     the line at which a call changes a value: checked after each line, once a refusal is certain
    loss_lines            lines of a loss function: export records those of functions named ``forward`` alone
    name_sliced_modules   modules by their names in the model, where a forward takes a slice of a list of modules

Source lines of captured nodes are in passes.program.source_lines.
"""

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NoReturn

from torch import fx, nn
from torch.fx.proxy import TracerBase

from passes.errors import PlanError, Where
from passes.interceptors import installed
from passes.program.source_lines import code_of, is_foreign_frame, where_of_frame
from planner.capture.own_loss import Combined, parts_of

_LIBRARY = os.path.dirname(os.__file__) + os.sep
_FRAMES_FILTER = "_filter_traceback_frames"
_SLICED = re.compile(r"\.slice\((None|-?\d+), (None|-?\d+), (None|-?\d+)\)\.(\d+)")


class CallSites:
    """Knows the names of a model's modules, to find the module of a frame.

    Modules are compared by their attributes: export replaces shared ones by stand-ins with the same ``__dict__``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(vars(module)): name for name, module in model.named_modules()}

    def here(self) -> Where:
        """Return the innermost source line of the user that is running now."""
        return self._innermost(reversed([*traceback.walk_stack(sys._getframe(1))]))

    def refuse(self, what: str, fix: str) -> NoReturn:
        """Raise PlanError at the source line that is running now."""
        raise PlanError(what, where=self.here(), fix=fix)

    def frames_here(self) -> tuple[tuple[str, int], ...]:
        """Return file and line of each running frame of the user's code, the outermost first."""
        frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe(1)))
        return tuple(reversed([(file, line) for file, line in frames if not is_foreign_frame(file)]))

    def of(self, error: BaseException) -> Where:
        """Return the deepest frame of the traceback that is not PyTorch's own."""
        return self._innermost(traceback.walk_tb(error.__traceback__))

    def _innermost(self, outermost_first: Iterable[tuple[FrameType, int]]) -> Where:
        users = [(f, line) for f, line in outermost_first if not is_foreign_frame(f.f_code.co_filename)]
        if not users:
            return Where()
        held_by = [first for f, _ in reversed(users) if isinstance(first := _first_argument(f), nn.Module)]
        module = next((name for held in held_by if (name := self._names.get(id(vars(held)))) is not None), "")
        frame, line = users[-1]
        return where_of_frame(frame.f_code, line, module)


def _first_argument(frame: FrameType) -> object:
    """Return ``self`` of a method, under any name."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def called_by_user(also: str = "") -> bool:
    """Return whether the function that calls this one was called from the user's code, not from within PyTorch.

    ``also``: the end of the name of a file of PyTorch that counts as the user's.
    """
    file = sys._getframe(2).f_code.co_filename
    return not is_foreign_frame(file) or bool(also and file.endswith(also))


def is_of_python(frame: FrameType) -> bool:
    """Return whether a frame is in Python's own library: a log record has a time that the forward does not use."""
    return frame.f_code.co_filename.startswith(_LIBRARY) and "site-packages" not in frame.f_code.co_filename


def line_that_changes(has_changed: Callable[[], bool], run: Callable[[], Any], module: str) -> Where | None:
    """Return the first line of ``run`` after which something ``has_changed``, in ``module``; or None."""
    found, last = list[tuple[CodeType, int]](), dict[FrameType, int]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if found or is_foreign_frame(frame.f_code.co_filename) or is_of_python(frame):
            return None
        if has_changed():
            of = next((f for f, _ in traceback.walk_stack(frame) if f in last), frame)  # which calls, if this is new
            found.append((of.f_code, last.get(of, of.f_lineno)))
            return None
        last[frame] = frame.f_lineno
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(outer)
    return where_of_frame(*found[0], module) if found else None


@contextmanager
def loss_lines(model: nn.Module) -> Iterator[None]:
    """Record calls of the loss of ``model`` with its source lines, around an export."""
    code, original = code_of(_loss_of(model)), getattr(TracerBase, _FRAMES_FILTER, None)
    if code is None or original is None:
        yield
        return

    def filtered(tracer: TracerBase, frames: traceback.StackSummary) -> traceback.StackSummary:
        kept = {id(frame) for frame in original(tracer, frames)} | {id(frame) for frame in _of_loss(frames, code)}
        return traceback.StackSummary.from_list([frame for frame in frames if id(frame) in kept])

    with installed((TracerBase, _FRAMES_FILTER, filtered)):
        yield


def _loss_of(model: nn.Module) -> Callable[..., Any] | None:
    parts = parts_of(type(model))
    return model.loss_function if isinstance(model, Combined) else None if parts is None else parts[1]


def _of_loss(frames: traceback.StackSummary, code: CodeType) -> Iterator[traceback.FrameSummary]:
    """Yield the user's frames from the loss on, but not those below a forward that it calls."""
    place, is_inside = (code.co_filename, code.co_name), False
    for frame in frames:
        is_inside = (is_inside and frame.name != "forward") or (frame.filename, frame.name) == place
        if is_inside and not is_foreign_frame(frame.filename):
            yield frame


def name_sliced_modules(graph: fx.Graph, model: nn.Module) -> None:
    """Write the model's own names into the ``nn_module_stack`` of every node."""
    own: dict[str, str] = {}
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        if any(".slice(" in str(path) for path, _ in stack.values()):
            for path, _ in stack.values():
                own.setdefault(path, _own_path(path, model))
            node.meta["nn_module_stack"] = {
                key.replace(path, own[path]): (own[path], kind) for key, (path, kind) in stack.items()
            }


def _own_path(path: str, model: nn.Module) -> str:
    while (found := _SLICED.search(path)) is not None:
        *bounds, place = (None if text == "None" else int(text) for text in found.groups())
        names = list(model.get_submodule(path[: found.start()])._modules)
        path = f"{path[: found.start()]}.{names[slice(*bounds)][place or 0]}{path[found.end() :]}"
    return path
