"""A model that its user compiled, in full or in part, without that: its modules by their own names, run eagerly.

    blocks.0._orig_mod.up.weight     as torch.compile(blocks[0]) names a parameter
    blocks.0.up.weight               as the module that was compiled names it

A plan shards the model's own ops, and compiles what each rank then runs. ``Module.compile()``, compiled functions and
methods are no modules: they run as written under PyTorch's own switch for all of them, its stance.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from passes.errors import PlanError

NOTE = (
    "torch.compile in the model has no effect here: what each rank runs is compiled by compile: true in the spec, and "
    "captured as if nothing were compiled"
)
_WRAPPER = re.compile(r"(?<![^./])_orig_mod\.")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_uncompiled: WeakSet[nn.Module] = WeakSet()


def plain_name(name: str) -> str:
    """The name of a tensor in the module that was compiled."""
    return _WRAPPER.sub("", name)


def unwrapped(module: Any) -> Any:
    """The module that torch.compile was given; anything else itself. Raises PlanError for a wrapper with hooks."""
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    while kind is not None and isinstance(module, kind):
        if any(vars(module).get(hooks) for hooks in _HOOKS):
            raise PlanError(
                "hooks are registered on what torch.compile returned, and would not run",
                where=type(module._orig_mod).__name__,  # pyright: ignore[reportAttributeAccessIssue]
                fix="register them on the module before it is compiled, or use module.compile()",
            )
        module = module._orig_mod  # pyright: ignore[reportAttributeAccessIssue]
    return module


def uncompiled(model: nn.Module) -> nn.Module:
    """``model`` without torch.compile's wrappers of modules. It shares all modules that hold none, all tensors, and the
    attributes of the others; ``model`` is not changed.
    """
    plain = _without_wrappers(model, {})
    if plain is not model:
        _uncompiled.add(plain)
    return plain


def was_compiled(model: nn.Module) -> bool:
    """Whether ``uncompiled`` removed wrappers to make it."""
    return model in _uncompiled


@contextmanager
def in_eager_mode() -> Iterator[list[Any]]:
    """Inside, compiled modules, functions and methods run as written. Yields what was compiled and has run."""
    eval_frame: Any = import_module("torch._dynamo.eval_frame")  # here: it takes a second
    found: list[Any] = []
    original = eval_frame._callback_from_stance, eval_frame.OptimizedModule.__call__

    def noted(callback: Any) -> Any:
        if callable(callback):
            found.append(callback)
        return original[0](callback)

    def call(wrapper: Any, *args: Any, **kwargs: Any) -> Any:  # one that is no submodule: a closure has it
        found.append(wrapper)
        return unwrapped(wrapper)(*args, **kwargs)

    eval_frame._callback_from_stance, eval_frame.OptimizedModule.__call__ = noted, call
    try:
        # a scripted or traced function runs its graph as written, not as its first calls have specialised it
        with torch.compiler.set_stance("force_eager"), torch.jit.optimized_execution(False):
            yield found
    finally:
        eval_frame._callback_from_stance, eval_frame.OptimizedModule.__call__ = original


def _without_wrappers(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """``made``: those of modules seen before, which may have several names."""
    own = unwrapped(module)
    if id(own) not in made:
        made[id(own)] = own
        held = own._modules.items()
        inner = {name: None if child is None else _without_wrappers(child, made) for name, child in held}
        if any(inner[name] is not child for name, child in held):
            made[id(own)] = copy = object.__new__(type(own))
            object.__setattr__(copy, "__dict__", {**vars(own), "_modules": inner})
    return made[id(own)]
