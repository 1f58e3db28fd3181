"""Detect changes of a model since its capture in this process, in everything that a forward may read in Python.

Classes, attributes and configs of all modules; names, shapes, strides, dtypes and ties of parameters; values of buffers
and of tensors that are attributes: written as pickle writes them (and never read), and hashed. An object without a
well-defined form (a hook, a closure, an object with its own pickling) is compared by identity, and by its attributes
and cells.

Not compared: values of weights, as no capture depends on them; globals; state of objects that Python does not expose.
"""

from __future__ import annotations

import dis
import enum
import hashlib
import pickle
from collections.abc import Iterator
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from planner.capture.graphs_equal import fingerprint
from planner.capture.model.exchange import GLOBAL_HOOKS, storage_of
from planner.capture.python.modules import content_of

_SETTINGS = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.is_grad_enabled()": torch.is_grad_enabled,
    "torch.is_autocast_enabled('cpu')": lambda: torch.is_autocast_enabled("cpu"),
}
_MOST_BYTES = 1 << 28  # of buffers and of tensors that are attributes
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_HOOKS = [name for name in vars(nn.Module()) if name.endswith("hooks")]
_NAMED = (torch.dtype, torch.device, torch.memory_format, torch.layout)
_HASHABLE = (bool, int, float, str, bytes, type(None))
_PICKLED_BY = ("__reduce_ex__", "__reduce__", "__getstate__")
_UNWRITABLE = (pickle.PickleError, TypeError, ValueError, AttributeError, RecursionError)


class ModelState:
    """A digest of each attribute, buffer and parameter of a model at one time; keeps the visited objects alive."""

    def __init__(self, model: nn.Module) -> None:
        writer = _Writer(model)
        self._held = writer.held  # an object that is alive shares its id with no other
        self._digests = {name: writer.digest(value) for name, value in _parts(model)}

    def difference(self, before: ModelState) -> str | None:
        """Return the first part that differs from ``before``, by its dotted name; None if none does."""
        now, then = self._digests, before._digests
        for names, word in ((now.keys() - then.keys(), "new"), (then.keys() - now.keys(), "gone")):
            if names:
                return f"{min(names)} is {word}"
        return next((f"{name} has changed" for name in now if now[name] != then[name]), None)


def _parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of everything that a forward may read."""
    yield from ((name, str(setting())) for name, setting in _SETTINGS.items())
    yield from ((name, vars(module_hooks)[name]) for name in GLOBAL_HOOKS)
    for path, module in model.named_modules(remove_duplicate=False):
        before = f"{path}." if path else ""
        yield f"the class of {path or 'the model'}", (type(module), getattr(type(module), "forward", None))
        held = [dict(vars(module)), *(getattr(module, kind) for kind in _OF_MODULES)]
        for name in (*_OF_MODULES, *(hooks for hooks in _HOOKS if not held[0].get(hooks))):
            held[0].pop(name, None)
        yield from ((before + name, value) for part in held for name, value in part.items())


class _Writer(pickle.Pickler):
    """Writes within one process: an object without a well-defined form is written by identity.

    Owns the current digest, and numbers of visited objects and of memories of tensors. ``held`` keeps visited objects
    alive, so that no other object gets their ids.
    """

    def __init__(self, model: nn.Module) -> None:
        target: Any = SimpleNamespace(write=lambda data: self._digest.update(data))
        super().__init__(target, protocol=4)
        self.fast = True  # equal strings are written alike, be they one object or two
        self.held: list[Any] = []
        self._digest, self._num_bytes = hashlib.sha256(), 0
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._seen, self._memories = dict[int, int](), dict[int, int]()

    def digest(self, value: Any) -> bytes:
        if type(value) in _HASHABLE or (type(value) in (dict, set) and not value):
            return f"{type(value)} {value!r}".encode()
        self._digest = hashlib.sha256()
        try:
            self.dump(value)
        except _UNWRITABLE:
            self.held.append(value)
            return str(id(value)).encode()
        return self._digest.digest()

    def persistent_id(self, obj: Any) -> Any:
        """Return the form of an object that pickle would write otherwise; None for all others."""
        kind = type(obj)
        if kind in _HASHABLE or kind in (list, tuple, dict):
            return None
        if isinstance(obj, type):
            self.held.append(obj)
            return "class", id(obj)
        if isinstance(obj, MethodType):
            return "method", obj.__self__, obj.__func__
        if kind in (set, frozenset):
            self.held.extend(obj)
            is_plain = all(type(member) in _HASHABLE for member in obj)
            return kind.__name__, sorted(map(repr, obj) if is_plain else map(id, obj))
        if isinstance(obj, nn.Module) and id(obj) in self._modules:
            return "module", self._modules[id(obj)]
        if kind in _NAMED:
            return kind.__name__, str(obj)
        if (place := self._seen.get(id(obj))) is not None:
            return "again", place
        self._seen[id(obj)] = len(self._seen)
        self.held.append(obj)
        if isinstance(obj, Tensor):
            return self._tensor(obj)
        has_form = isinstance(obj, enum.Enum) or (_is_shown(obj) and not _noted_at_entry(kind))
        return None if has_form and not isinstance(obj, (FunctionType, nn.Module)) else _itself(obj)

    def _tensor(self, value: Tensor) -> tuple[Any, ...]:
        """Return a tensor's form: with content unless a parameter; by identity if special, hooked or too large."""
        marks = type(value), value.dtype, value.requires_grad, vars(value)
        is_plain = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided
        has_hooks = bool(value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None))
        if is_plain and type(value) is Tensor and not value.is_meta:
            self._num_bytes += value.numel() * value.element_size()
        if not is_plain or has_hooks or self._num_bytes > _MOST_BYTES:
            return "tensor", id(value), value._version, tuple(value.shape), *marks
        memory = self._memories.setdefault(storage_of(value), len(self._memories))
        layout = tuple(value.shape), value.stride(), value.storage_offset(), memory
        has_content = type(value) is Tensor and not value.is_meta
        return "tensor", *layout, *marks, fingerprint(value.detach().cpu()) if has_content else None


def _itself(obj: Any) -> tuple[Any, ...]:
    """Return the identity of the object, and its state that Python can see."""
    if not isinstance(obj, FunctionType):
        noted = _noted_at_entry(type(obj))
        return "object", id(obj), {k: v for k, v in getattr(obj, "__dict__", {}).items() if k not in noted}
    cells = list(map(content_of, obj.__closure__ or ()))
    return "function", id(obj), id(obj.__code__), cells, obj.__defaults__, obj.__kwdefaults__, vars(obj)


def _noted_at_entry(kind: type) -> set[str]:
    """Return the attributes that a context manager sets on entry, as ``@torch.autocast`` does: settings around it."""
    enter = getattr(kind, "__enter__", None)
    calls = dis.get_instructions(enter) if isinstance(enter, FunctionType) else ()
    return {call.argval for call in calls if call.opname == "STORE_ATTR"}


def _is_shown(obj: Any) -> bool:
    """Return whether pickle shows all of its state, without running code of the user."""
    if any(isinstance(getattr(type(obj), name, None), FunctionType) for name in _PICKLED_BY):
        return False
    try:
        obj.__reduce_ex__(4)
    except Exception:
        return False
    return True
