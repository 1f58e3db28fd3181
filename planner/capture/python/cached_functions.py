"""Functions under ``functools.lru_cache``: a forward fills them, and its tensors have no values while it is traced.

    @lru_cache
    def table(n): return torch.arange(n).cos()      each forward that is traced computes it, in the graph

Each traced forward finds the caches as the user left them, and so does the user's next call. A result that is made of
constants is the same whether it is computed once or in each step. Any other one (drawn, or made of a weight or of the
batch) is frozen by one process at its first call, and refused.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from passes.errors import PlanError, Where
from planner.capture.python.modules import own_modules

_CACHED: Any = functools._lru_cache_wrapper
_ENTRY = "_lru_list_elem"
_PLAIN = (bool, int, float, str, bytes, type, type(None), torch.dtype, torch.device)


class CachedFunctions:
    """Owns the count of misses of each cached function that a forward of ``model`` may call, when it is made."""

    def __init__(self, model: nn.Module) -> None:
        self._misses = {function: function.cache_info().misses for function in dict.fromkeys(_reachable(model))}

    def forget(self) -> None:
        """Clear the caches that were filled since, and may hold tensors."""
        for function in self._filled():
            if not all(isinstance(result, _PLAIN) for result in _results(function)):
                function.cache_clear()
                self._misses[function] = 0

    def tensors(self) -> list[tuple[Tensor, Any]]:
        """Each tensor in a cache that was filled since, and its function."""
        return [(tensor, function) for function in self._filled() for tensor in _tensors(_results(function))]

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
    """The kept results. The cache refers to its keys and results in turn, or to one dict of them if it has no limit."""
    info, held = function.cache_info(), gc.get_referents(function)
    held = [o for o in held if o is not _CACHED and not (isinstance(o, type) and o.__name__ == _ENTRY)]
    return list(held[0].values()) if info.maxsize is None else held[1 : 2 * info.currsize : 2]


def _tensors(results: Iterable[Any]) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(list(results)):
        if isinstance(leaf, Tensor):
            yield leaf
        elif not isinstance(leaf, (*_PLAIN, nn.Module)):
            yield from (
                inner for inner in pytree.tree_leaves(getattr(leaf, "__dict__", {})) if isinstance(inner, Tensor)
            )


def _reachable(model: nn.Module) -> Iterator[Any]:
    """Cached functions in modules of Python, in classes there, and in attributes of the model's modules."""
    for module in own_modules(model):
        for value in list(vars(module).values()):
            yield from _of(value)
            if isinstance(value, type) and value.__module__ == module.__name__:
                for inner in list(vars(value).values()):
                    yield from _of(inner)
    for module in model.modules():
        for value in list(vars(module).values()):
            yield from _of(value)


def _of(value: Any) -> Iterator[Any]:
    """The cached function that ``value`` is, or that it calls as a closure or a method of a class."""
    if isinstance(value, (classmethod, staticmethod, property)):
        value = value.fget if isinstance(value, property) else value.__func__
    if type(value) is _CACHED:
        yield value
    elif type(value) is FunctionType:
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        yield from (content for content in cells if type(content) is _CACHED)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
