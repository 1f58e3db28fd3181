"""Attributes that are something else for a while: the one place in which capture assigns to PyTorch, or to modules.

    installed((axis, "phase", "backward"))                              as of a backward that repeats a forward
    nn.Module._call_impl, Tensor.data, ShapeEnv.evaluate_sym_node …     watched while a forward runs
    torch.jit.is_tracing in every module that has it by some name       answered as in eager mode
    isinstance in the modules of a user                                 hides Python's own

An interceptor is (owner, name, replacement). Interceptors are installed in their order and left in reverse, each even
if another one raises, so that nested ones of the same attribute end with the original.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

Interceptor = tuple[Any, str, Any]
_ABSENT = object()


@contextmanager
def installed(*interceptors: Interceptor) -> Iterator[None]:
    before: list[Interceptor] = []
    try:
        for owner, name, replacement in interceptors:
            has_content = hasattr(owner, "__dict__")  # an object with slots has none
            before.append((owner, name, vars(owner).get(name, _ABSENT) if has_content else getattr(owner, name)))
            _assign(owner, name, replacement)
        yield
    finally:
        _restore(before)


def _restore(before: list[Interceptor]) -> None:
    # thousands in a capture: an ExitStack with a callback for each takes longer than what they watch
    try:
        while before:
            _assign(*before.pop())
    finally:
        if before:  # one has raised
            _restore(before)


def _assign(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, ModuleType):  # its own __setattr__ may look at names, or import something
        vars(owner).pop(name, None) if value is _ABSENT else vars(owner).__setitem__(name, value)
    elif value is _ABSENT:
        delattr(owner, name)  # it was inherited
    else:
        setattr(owner, name, value)


def by_identity(modules: Iterable[ModuleType], replacements: Mapping[int, tuple[Any, Any]]) -> Iterator[Interceptor]:
    """Yield all names of an object in ``modules``: id of the object → (object, replacement)."""
    for module in modules:
        if replacements.keys().isdisjoint(map(id, vars(module).values())):  # most of thousands of modules
            continue
        for name, value in vars(module).items():
            if id(value) in replacements:
                yield module, name, replacements[id(value)][1]


def hiding(modules: Iterable[ModuleType], names: Mapping[str, Any]) -> Iterator[Interceptor]:
    """Yield global names of ``modules`` that hide Python's built-ins, unless a module has its own."""
    return ((m, name, value) for m in modules for name, value in names.items() if name not in vars(m))
