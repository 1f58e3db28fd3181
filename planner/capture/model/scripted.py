"""Modules of torch.jit in a model: their code and their tensors lie in C++.

    module._c.weight ⇄ the model's own object      after each exchange of the tensors that the object stands for
    module.forward                                 without ``__wrapped__``, which torch calls wrongly under a mode

Scripted and traced modules are captured as the ops that their graph runs on the sizes of a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from passes.errors import PlanError


def tensors_in_scripts(modules: list[nn.Module]) -> list[tuple[Any, str, Tensor]]:
    """(module in C++, name, tensor) of each parameter and buffer of a scripted or traced module."""
    return [
        (module._c, name, tensor)
        for module in modules
        if isinstance(module, torch.jit.ScriptModule)
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None
    ]


@contextmanager
def scripts_unwrapped(modules: list[nn.Module]) -> Iterator[None]:
    """Inside, methods of scripted modules are those that C++ has, as of a module that was loaded from a file."""
    kept: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in modules:
            content = vars(module)
            for name in [n for n, value in content.items() if isinstance(value, torch.ScriptMethod)]:
                kept.append((content, name, content[name]))
                content[name] = module._c._get_method(name)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        yield
    finally:
        for content, name, value in kept:
            content[name] = value


def refuse_loaded(model: nn.Module) -> None:
    """Raise PlanError for parameters that are plain tensors, as torch.jit.load makes them: export takes none."""
    for name, tensor in model.named_parameters():
        if not isinstance(tensor, nn.Parameter):
            raise PlanError(
                f"the parameter {name} is no nn.Parameter: torch.jit.load makes plain tensors, and export takes none",
                where=name.rpartition(".")[0],
                fix="build the module from its Python class, and load the weights: "
                "`module.load_state_dict(loaded.state_dict())`",
            )
