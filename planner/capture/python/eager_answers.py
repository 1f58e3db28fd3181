"""Questions of a forward about tracing get the answers of eager mode, so that the capture is of the eager forward.

    torch.compiler.is_compiling(), torch.jit.is_tracing() …     no
    isinstance(x, FakeTensor)                                   no
    type(x), type(self.weight)                                  torch.Tensor, nn.Parameter

PyTorch itself asks too while it exports, and needs the true answer: a replaced function answers by the file of its
caller, and ``type`` and ``isinstance`` are hidden by names in the modules of the user alone. If eager mode would then
read values (``if not is_tracing(mask) and mask.all()``), the capture is repeated with the true answer for that one
line, which is reported.
"""

import builtins
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType, UnionType
from typing import Any, Union, get_args, get_origin

import torch
import torch._dynamo.external_utils
from torch import _guards, _utils, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import _symbolic_trace
from torch.fx.experimental import proxy_tensor
from torch.utils import _python_dispatch

from passes.errors import Where
from passes.interceptors import by_identity, hiding, installed
from passes.program.source_lines import is_foreign_frame
from planner.capture.model.exchange import Exchange
from planner.capture.python.modules import foreign_modules
from planner.capture.user_lines import CallSites

Stack = tuple[tuple[str, int, int], ...]  # the user's frames, innermost first: file, first line of the function, line
_NO = (
    (torch.compiler, "is_compiling", False),
    (torch.compiler, "is_dynamo_compiling", False),
    (torch.compiler, "is_exporting", False),
    (torch._dynamo.external_utils, "is_compiling", False),
    (_utils, "is_compiling", False),
    (torch.jit, "is_tracing", False),
    (torch._C, "_is_tracing", False),
    (torch._C, "_get_tracing_state", None),
    (_symbolic_trace, "is_fx_tracing", False),
    (_symbolic_trace, "is_fx_symbolic_tracing", False),
    (fake_tensor, "is_fake", False),
    (_guards, "detect_fake_mode", None),
    (_guards, "active_fake_mode", None),
    (proxy_tensor, "get_proxy_mode", None),
    (_python_dispatch, "_get_current_dispatch_mode", None),
    (_python_dispatch, "is_in_torch_dispatch_mode", False),
)  # fmt: skip
_MOST_FRAMES = 8
_USUAL = (nn.Parameter, torch.Tensor)
_NEAR = 12  # lines between a question and the branch that it guards


class EagerAnswers:
    """Owns the answers of one capture. ``traced``: the call stacks to which the true answer is given, with their
    prefixes down to a refused function; earlier captures of the model may have found them.
    """

    def __init__(self, model: nn.Module, exchange: Exchange, traced: dict[Stack, Where]) -> None:
        self.asked: dict[Stack, Where] = {}
        self.traced = traced
        self._is_over = True
        self._sites, self._modules = CallSites(model), foreign_modules()
        # by name: export puts tensors of its own in the places of parameters
        self._model, self._unusual = model, {n: k for n, k in exchange.classes.items() if k not in _USUAL}

    @contextmanager
    def given(self) -> Iterator[None]:
        replaced = {}
        owners: list[ModuleType] = [*self._modules, torch._dynamo, torch.fx]
        for owner, name, eager in _NO:
            original = getattr(owner, name, None)
            if original is not None:
                replaced[id(original)] = (original, self._answering(original, eager))
                owners.append(owner)
        hidden = {"isinstance": self._isinstance, "type": self._type()}
        # last: a module that is imported meanwhile may hold on to an answer
        running = self, "_is_over", False
        with installed(*by_identity(owners, replaced), *hiding(self._modules, hidden), running):
            yield

    def give_in(self, where: Where | str | None) -> bool:
        """After a refusal at ``where``: answer the question that led there truly from now on; False if there is none.

        It is the last question of the function with the refused line, or of one of its callers. Other calls of that
        function, which would be refused in their turn, get the same answer.
        """
        if not isinstance(where, Where):
            return False
        for stack, asked in reversed(self.asked.items()):
            near = [i for i, (file, _, n) in enumerate(stack) if file == where.file and abs(n - where.line) <= _NEAR]
            if near and stack not in self.traced:
                self.traced[stack] = self.traced[stack[: near[0] + 1]] = asked
                self.asked.clear()
                return True
        return False

    @property
    def notes(self) -> list[str]:
        lines = dict.fromkeys(map(str, self.traced.values()))
        return [
            f"the forward branches on tracing, and reads values in eager mode: captured as traced at {line}"
            for line in lines
        ]

    def _is_traced(self, frame: FrameType) -> bool:
        """Note a question from a user's frame; return whether it is answered truly."""
        stack = _users_stack(frame)
        self.asked.pop(stack, None)
        self.asked[stack] = self._sites.here()
        if any(stack[:n] in self.traced for n in range(1, len(stack))):
            self.traced.setdefault(stack, self.asked[stack])
        return stack in self.traced

    def _answering(self, original: Callable[..., Any], eager: Any) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if self._is_over or is_foreign_frame(frame.f_code.co_filename) or self._is_traced(frame):
                return original(*args, **kwargs)
            return eager

        answer.__name__, answer.__doc__ = original.__name__, original.__doc__
        return answer

    # ---- classes of tensors

    def _class_of(self, value: Any) -> Any:
        """Return the class that a fake tensor has in eager mode."""
        for name, kind in self._unusual.items():
            owner, _, attribute = name.rpartition(".")
            if getattr(self._model.get_submodule(owner), attribute, None) is value:
                return kind
        return nn.Parameter if getattr(value, "_is_param", False) else torch.Tensor

    def _isinstance(self, value: Any, kinds: Any) -> bool:
        is_one = builtins.isinstance(value, kinds)
        if builtins.type(value) is not FakeTensor:
            return is_one
        eager, each = self._class_of(value), _each(kinds)
        if any(k is not object and FakeTensor in getattr(k, "__mro__", ()) for k in each):
            if self._is_traced(sys._getframe(1)):
                return is_one
            each = [k for k in each if FakeTensor not in getattr(k, "__mro__", ())]
        return any(issubclass(eager, k) or builtins.isinstance(value, k) for k in each)

    def _type(self) -> Any:
        class_of = self._class_of

        class Meta(builtins.type):
            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                if len(args) == 1 and not kwargs:
                    found = builtins.type(args[0])
                    return class_of(args[0]) if found is FakeTensor else found
                return builtins.type(*args, **kwargs)

            def __instancecheck__(cls, value: Any) -> bool:
                return builtins.isinstance(value, builtins.type)

            def __subclasscheck__(cls, kind: Any) -> bool:
                return issubclass(kind, builtins.type)

        return Meta("type", (builtins.type,), {})


def _each(kinds: Any) -> list[Any]:
    if builtins.isinstance(kinds, tuple):
        return [k for inner in kinds for k in _each(inner)]
    if builtins.isinstance(kinds, UnionType) or get_origin(kinds) is Union:
        return [k for inner in get_args(kinds) for k in _each(inner)]
    return [kinds]


def _users_stack(frame: FrameType) -> Stack:
    codes = ((frame.f_code, line) for frame, line in traceback.walk_stack(frame))
    own = ((c.co_filename, c.co_firstlineno, line) for c, line in codes if not is_foreign_frame(c.co_filename))
    return tuple(itertools.islice(own, _MOST_FRAMES))
