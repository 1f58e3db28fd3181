"""Loss functions of the user's: their arguments, the inputs that they read, and the values that they return."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from passes.errors import PlanError, Where
from planner.named_code import NamedCode, is_named

FIX = "write `def loss(outputs, batch)`: the model's outputs and the dict of all inputs; it returns a scalar tensor"


class Batch(dict[str, Tensor]):
    """The inputs of a loss function, by name."""

    def __missing__(self, name: str) -> Tensor:
        frame = sys._getframe(1)
        raise PlanError(
            f"the loss function reads batch[{name!r}], which is no input (inputs: {', '.join(self)})",
            where=_line(frame.f_code.co_filename, frame.f_lineno),
            fix=f"add {name} to `inputs` of the spec, or read another one",
        )


def loss_function(loss: str) -> Callable[..., Any] | None:
    """The function that ``loss`` of a spec names; None if it names none. Raises PlanError."""
    if not is_named(loss):
        return None
    function = NamedCode(loss, "loss").load()
    if not callable(function):
        raise PlanError(f"loss: {loss} is a {type(function).__name__}, not a function", where="loss", fix=FIX)
    return function


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def check_arguments(function: Callable[..., Any], *args: str, name: str, fix: str, **kwargs: str) -> None:
    """Raise PlanError unless ``function`` can be called so."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        what = f"the loss function {name} takes {signature}, not ({', '.join((*args, *kwargs))})"
        raise PlanError(what, where=place_of(function), fix=fix) from None


def place_of(function: Callable[..., Any]) -> Where | str:
    """The line of its definition, or the key of the spec."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "loss" if code is None else _line(code.co_filename, code.co_firstlineno)


def checked(result: Any, function: Callable[..., Any], name: str) -> Any:
    """The result of a loss function. Raises PlanError unless it is, or has, a scalar with a gradient."""
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if isinstance(loss, Tensor) and loss.numel() == 1 and (loss.requires_grad or not torch.is_grad_enabled()):
        return result
    found = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    if isinstance(loss, Tensor) and loss.numel() == 1:
        found = "a scalar without a gradient"
    if isinstance(result, Mapping):
        found = f'a mapping with {found} under "loss"' if "loss" in result else 'a mapping without "loss"'
    raise PlanError(
        f"the loss function {name} returns {found}",
        where=place_of(function),
        fix='return a scalar tensor that depends on the model\'s outputs, or a dict with one under "loss"',
    )


def _line(file: str, line: int) -> Where:
    return Where(file=file, line=line, code=linecache.getline(file, line).strip())
