"""A digest of all that a forward may read of a model: models with equal ones, in any process, are captured alike.

Written as pickle writes it (nothing is ever read back). What has no certain form raises Uncertain: a closure, a hook, a
generator, an object that defines its own pickling.
"""

import enum
import hashlib
import math
import operator
import pickle
import warnings
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from planner.capture.model.exchange import GLOBAL_HOOKS, storage_of
from planner.capture.own_loss import parts_of

_MOST_BYTES = 1 << 28  # of buffers and of tensors that are attributes
OF_MODULES = ("_parameters", "_buffers", "_modules")
HOOKS = [name for name in vars(nn.Module()) if name.endswith("hooks")]
_BY_HASH_SEED = "_original_object_hash"  # transformers keeps the hash() of its GenerationConfig, no two processes alike
_NAMED = (torch.dtype, torch.device, torch.memory_format, torch.layout)
HASHABLE = (bool, int, float, str, bytes, type(None))
PICKLED_BY = ("__reduce_ex__", "__reduce__", "__getstate__")
UNWRITABLE = (pickle.PickleError, TypeError, ValueError, AttributeError, RecursionError)
_HOUSES: tuple[Any, ...] = (torch, torch._C._nn, torch.special, math, operator)  # pyright: ignore


class Uncertain(Exception):
    """Something that a forward may read has no certain form: two processes may not find it equal."""


def digest_of(model: nn.Module) -> str:
    """Of all that a forward may read of it. Raises Uncertain if a part of ``model`` has no certain form."""
    if any(getattr(module_hooks, name) for name in GLOBAL_HOOKS):
        raise Uncertain("modules have global hooks")
    found = hashlib.sha256()
    writer = _Writer(model, found)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, module in model.named_modules(remove_duplicate=False):
                writer.dump((name, type(module), *_parts(name, module)))
    except UNWRITABLE as error:
        raise Uncertain(f"the model holds state without a certain form: {error}") from error
    return found.hexdigest()


def _parts(name: str, module: nn.Module) -> list[Any]:
    for hooks in HOOKS:
        if getattr(module, hooks, None):
            raise Uncertain(f"{name or 'the model'} has hooks")
    attributes = {key: value for key, value in vars(module).items() if key not in (*OF_MODULES, *HOOKS)}
    return [attributes, *(list(getattr(module, kind).items()) for kind in OF_MODULES)]


class _Writer(pickle.Pickler):
    """Owns the numbers of objects that were written before, and the memories of tensors."""

    def __init__(self, model: nn.Module, found: Any) -> None:
        super().__init__(SimpleNamespace(write=found.update), protocol=4)  # pyright: ignore[reportArgumentType]
        self.fast = True  # equal strings are written alike, be they one object or two
        self._modules = {id(module): name for name, module in model.named_modules()}
        self.seen: dict[int, int] = {}
        self.held: list[Any] = []  # seen objects stay alive: no other object takes their ids
        self._memories: dict[int, int] = {}
        self._num_bytes = 0

    def persistent_id(self, obj: Any) -> Any:
        """How an object is written that pickle would write otherwise; None for all others."""
        kind = type(obj)
        if isinstance(obj, type):
            parts = parts_of(obj)
            return None if parts is None else ("with loss", *parts)
        if kind in HASHABLE or kind in (list, tuple, dict):
            return None
        if isinstance(obj, nn.Module):
            return "module", self._name_of(obj)
        if kind in _NAMED:
            return kind.__name__, str(obj)
        if kind in (set, frozenset):
            return kind.__name__, _in_order(obj)
        if kind is BuiltinFunctionType:
            return _name_of_builtin(obj)
        if (place := self.seen.get(id(obj))) is not None:
            return "again", place
        self.seen[id(obj)] = len(self.seen)
        self.held.append(obj)
        return self._tensor(obj) if isinstance(obj, Tensor) else None

    def reducer_override(self, obj: Any) -> Any:
        """Functions and classes are written by name, and refused if another object has that name."""
        if isinstance(obj, FunctionType):
            if obj.__closure__ or vars(obj):
                raise Uncertain(f"the function {obj.__qualname__} holds state")
        elif not isinstance(obj, (type, enum.Enum)):
            methods = (getattr(type(obj), name, None) for name in PICKLED_BY)
            if any(isinstance(method, FunctionType) for method in methods):
                raise Uncertain(f"{type(obj).__qualname__} says itself how it is pickled")
            if _BY_HASH_SEED in getattr(obj, "__dict__", ()):
                return type(obj), (), {k: v for k, v in vars(obj).items() if k != _BY_HASH_SEED}
        return NotImplemented

    def _name_of(self, module: nn.Module) -> str:
        if id(module) not in self._modules:
            raise Uncertain("an attribute is a module that is not registered")
        return self._modules[id(module)]

    def _tensor(self, value: Tensor) -> tuple[Any, ...]:
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            raise Uncertain(f"a tensor is a {type(value).__name__}")
        if value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None):
            raise Uncertain("a tensor has hooks")
        memory = self._memories.setdefault(storage_of(value), len(self._memories))
        layout = tuple(value.shape), value.stride(), value.storage_offset(), memory
        marks = type(value), value.dtype, value.requires_grad, vars(value)
        return "tensor", *layout, *marks, None if type(value) is nn.Parameter else self._content(value)

    def _content(self, value: Tensor) -> bytes | None:
        if value.is_meta:
            return None
        self._num_bytes += value.numel() * value.element_size()
        if self._num_bytes > _MOST_BYTES:
            raise Uncertain("the buffers are too large to compare")
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(memoryview(flat.numpy())).digest()  # pyright: ignore[reportArgumentType]


def _in_order(members: Any) -> list[str]:
    if not all(type(member) in HASHABLE for member in members):
        raise Uncertain("a set holds objects")
    return sorted(map(repr, members))


def _name_of_builtin(function: Any) -> tuple[str, str]:
    for house in _HOUSES:
        if getattr(house, function.__name__, None) is function:
            return house.__name__, function.__name__
    raise Uncertain(f"{function.__name__} is no function of torch")
