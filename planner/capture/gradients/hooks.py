"""Refuse hooks on a model that change its gradients: capture keeps the forward alone, so they would be lost.

    module.register_full_backward_hook, register_full_backward_pre_hook, register_backward_hook, and their global forms
    parameter.register_hook, parameter.register_post_accumulate_grad_hook

Hooks that a forward sets on its tensors are found while it is exported (capture.gradients.python_side). Forward hooks
are part of the forward, and so are captured.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules

from passes.errors import PlanError, Where

HOOK_FIX = (
    "remove the hook, and scale the gradient in the forward: `c * x + ((1 - c) * x).detach()` multiplies the "
    "gradient of x by c, a number or a mask"
)


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raise PlanError at the first hook on a gradient, naming its owner and the line of its function."""
    for what, module, hook in _hooks(model):
        raise PlanError(
            f"a hook on the gradients of {what} would be lost: a plan contains only the computation of the forward",
            where=_where(module, hook),
            fix=HOOK_FIX,
        )


def _hooks(model: nn.Module) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """(owner in words, module path, function) of every hook."""
    for kind in ("_global_backward_hooks", "_global_backward_pre_hooks"):
        for hook in getattr(torch_modules, kind, {}).values():
            yield "every module", "", hook
    for path, module in model.named_modules():
        for kind in ("_backward_pre_hooks", "_backward_hooks"):
            for hook in (getattr(module, kind, None) or {}).values():
                yield f"module {path or type(module).__name__}", path, hook
    for name, parameter in model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            for hook in (getattr(parameter, kind, None) or {}).values():
                yield f"parameter {name}", name.rpartition(".")[0], hook


def _where(module: str, hook: Callable[..., Any]) -> Where:
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    code = getattr(function, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
    if code is None:
        return Where(module)
    file, line = code.co_filename, code.co_firstlineno
    return Where(module, file, line, linecache.getline(file, line).strip())
