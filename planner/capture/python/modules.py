"""The Python modules with code that a forward may run: those of the model's classes, and others.

users_modules      modules that define the model's classes and their bases
own_modules        also those of a user that are not installed
foreign_modules    also all others of a user or a library: a forward may import them when it needs them
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

_NOT_USERS = {*sys.stdlib_module_names, "torch", "numpy", "sympy", "builtins", "planner", "passes", "runtime"}


def users_modules(model: nn.Module) -> list[ModuleType]:
    """The Python modules, other than PyTorch's, in which the model's classes and their bases are written."""
    kinds = dict.fromkeys(type(m) for m in model.modules())
    names = dict.fromkeys(base.__module__ for kind in kinds for base in kind.__mro__)
    found = (sys.modules.get(name) for name in names if name.partition(".")[0] not in ("torch", "builtins"))
    return [module for module in found if module is not None]


def foreign_modules() -> list[ModuleType]:
    """All Python modules that are neither Python's own nor PyTorch's, nor a library that knows nothing of tracing."""
    named = ((name, module) for name, module in list(sys.modules.items()) if name.partition(".")[0] not in _NOT_USERS)
    return [module for _, module in named if isinstance(module, ModuleType)]


def own_modules(model: nn.Module) -> list[ModuleType]:
    """Those of the model's classes, and all that are not installed: other installed packages may read a clock for
    themselves, even in the middle of a forward, as in a callback of the garbage collector.
    """
    found = {id(module): module for module in users_modules(model)}
    for module in foreign_modules():
        if not {"site-packages", "dist-packages"} & set(Path(getattr(module, "__file__", None) or "").parts):
            found[id(module)] = module
    return list(found.values())


@contextmanager
def names_replaced(modules: list[ModuleType], replacements: Mapping[int, tuple[Any, Any]]) -> Iterator[None]:
    """In ``modules``, names of an object have its replacement meanwhile: id of the object → (object, replacement)."""
    changed: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in modules:
            names = vars(module)
            before = {name: value for name, value in names.items() if id(value) in replacements}
            if before:
                changed.append((names, before))
                names.update({name: replacements[id(value)][1] for name, value in before.items()})
        yield
    finally:
        for names, before in changed:
            names.update(before)


@contextmanager
def names_added(modules: list[ModuleType], added: Mapping[str, Any]) -> Iterator[None]:
    """``modules`` have these global names meanwhile, unless they have their own: they hide Python's built-ins."""
    changed = [(vars(m), [n for n in added if n not in vars(m)]) for m in modules]
    try:
        for names, new in changed:
            names.update({name: added[name] for name in new})
        yield
    finally:
        for names, new in changed:
            for name in new:
                names.pop(name, None)
