"""The Python modules with code that a forward may run: those of the model's classes, and others; and their caches.

Functions under ``functools.lru_cache``: a forward fills them, and its tensors have no values while it is traced.

    @lru_cache
    def table(n): return torch.arange(n).cos()      each forward that is traced computes it, in the graph

Each traced forward finds the caches as the user left them, and so does the user's next call. A result that is made of
constants is the same whether it is computed once or in each step. Any other one (drawn, or made of a weight or of the
batch) is frozen by one process at its first call, and refused.
"""

import functools
import gc
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from passes.errors import PlanError, Where
from planner.capture.model.exchange import tensors_in

_NOT_USERS = {*sys.stdlib_module_names, "torch", "numpy", "sympy", "builtins", "planner", "passes", "runtime"}
_CACHED: Any = functools._lru_cache_wrapper
_ENTRY = "_lru_list_elem"
_PLAIN = (bool, int, float, str, bytes, type, type(None), torch.dtype, torch.device)


def users_modules(model: nn.Module) -> list[ModuleType]:
    """Return the Python modules, other than PyTorch's, that define the model's classes and their bases."""
    kinds = dict.fromkeys(type(m) for m in model.modules())
    names = dict.fromkeys(base.__module__ for kind in kinds for base in kind.__mro__)
    found = (sys.modules.get(name) for name in names if name.partition(".")[0] not in ("torch", "builtins"))
    return [module for module in found if module is not None]


def foreign_modules() -> list[ModuleType]:
    """Return all modules but those of Python, PyTorch, and libraries that know nothing of tracing. A forward may import
    them when it needs them.
    """
    named = ((name, module) for name, module in list(sys.modules.items()) if name.partition(".")[0] not in _NOT_USERS)
    return [module for _, module in named if isinstance(module, ModuleType)]


def own_modules(model: nn.Module) -> list[ModuleType]:
    """Return modules of the model's classes, and all that are not installed: other installed packages may read a clock
    for themselves, even during a forward, as in a callback of the garbage collector.
    """
    others = (m for m in foreign_modules() if not _is_installed(getattr(m, "__file__", None) or ""))
    # by id: any object may stand in sys.modules, also one without a hash
    return list({id(module): module for module in (*users_modules(model), *others)}.values())


@functools.cache  # each capture asks several times for each module that is loaded
def _is_installed(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


class CachedFunctions:
    """Owns the count of misses of each cached function that a forward of ``model`` may call, at construction."""

    def __init__(self, model: nn.Module) -> None:
        self._misses = {function: function.cache_info().misses for function in dict.fromkeys(_reachable(model))}

    def forget(self) -> None:
        """Clear the caches that were filled since and may hold tensors."""
        for function in self._filled():
            if not all(isinstance(result, _PLAIN) for result in _results(function)):
                function.cache_clear()
                self._misses[function] = 0

    def tensors(self) -> list[tuple[Tensor, Any]]:
        """Return each tensor in a cache that was filled since, with its function."""
        return [(tensor, function) for function in self._filled() for tensor in _tensors_held(_results(function))]

    def _filled(self) -> list[Any]:
        return [function for function, before in self._misses.items() if function.cache_info().misses != before]


def refuse_frozen(function: Any) -> None:
    """Raise PlanError for a cached result that is not made of constants."""
    code = getattr(function.__wrapped__, "__code__", None)
    where = Where() if code is None else Where("", code.co_filename, code.co_firstlineno, f"def {code.co_name}(…)")
    raise PlanError(
        f"{function.__qualname__} keeps a result (lru_cache) that is not made of constants: it is computed at the "
        "first call, and every later step would read that value",
        where=where,
        fix="compute it in each forward, without lru_cache",
    )


def _results(function: Any) -> list[Any]:
    """Return the cached results: a cache refers to keys and results in turn, or to a dict of them if unlimited."""
    info, held = function.cache_info(), gc.get_referents(function)
    held = [o for o in held if o is not _CACHED and not (isinstance(o, type) and o.__name__ == _ENTRY)]
    return list(held[0].values()) if info.maxsize is None else held[1 : 2 * info.currsize : 2]


def _tensors_held(results: Iterable[Any]) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(list(results)):
        if isinstance(leaf, Tensor):
            yield leaf
        elif not isinstance(leaf, (*_PLAIN, nn.Module)):
            yield from tensors_in(getattr(leaf, "__dict__", {}))


def _reachable(model: nn.Module) -> Iterator[Any]:
    """Yield cached functions in modules of Python, in classes there, and in attributes of the model's modules."""
    for module in own_modules(model):
        for value in list(vars(module).values()):
            yield from _cached_of(value)
            if isinstance(value, type) and value.__module__ == module.__name__:
                for inner in list(vars(value).values()):
                    yield from _cached_of(inner)
    for module in model.modules():
        for value in list(vars(module).values()):
            yield from _cached_of(value)


def _cached_of(value: Any) -> Iterator[Any]:
    """Yield the cached function that ``value`` is, or that it calls as a closure or a method of a class."""
    if isinstance(value, (classmethod, staticmethod, property)):
        value = value.fget if isinstance(value, property) else value.__func__
    if type(value) is _CACHED:
        yield value
    elif type(value) is FunctionType:
        yield from (content for content in map(content_of, value.__closure__ or ()) if type(content) is _CACHED)


def content_of(cell: Any, empty: Any = None) -> Any:
    """Return the content of a cell, or ``empty``."""
    try:
        return cell.cell_contents
    except ValueError:
        return empty
