"""Has a model changed since it was captured in this process? Compares all that a forward may read of it in Python.

An object without a certain form (a hook, a closure, an object with its own pickling) is compared by identity, and by
its attributes and cells.

Not compared: values of weights, as no capture depends on them; globals; state of objects that Python does not expose.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from planner.capture.kept import values
from planner.capture.kept.values import Uncertain
from planner.capture.model.global_hooks import GLOBAL_HOOKS

_SETTINGS = {
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.is_grad_enabled()": torch.is_grad_enabled,
    "torch.is_autocast_enabled('cpu')": lambda: torch.is_autocast_enabled("cpu"),
}


class ModelState:
    """A digest of each attribute, buffer and parameter of a model at one time; it keeps the seen objects alive."""

    def __init__(self, model: nn.Module) -> None:
        writer = _Here(model)
        self._held = writer.held  # an object that is alive shares its id with no other
        self._digests = {name: writer.digest(value) for name, value in _parts(model)}

    def difference(self, before: ModelState) -> str | None:
        """The first part that differs from ``before``, by its dotted name; None if none does."""
        now, then = self._digests, before._digests
        for names, word in ((now.keys() - then.keys(), "new"), (then.keys() - now.keys(), "gone")):
            if names:
                return f"{min(names)} is {word}"
        return next((f"{name} has changed" for name in now if now[name] != then[name]), None)


def _parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of all that a forward may read."""
    yield from ((name, str(setting())) for name, setting in _SETTINGS.items())
    yield from ((name, vars(module_hooks)[name]) for name in GLOBAL_HOOKS)
    for path, module in model.named_modules(remove_duplicate=False):
        before = f"{path}." if path else ""
        yield f"the class of {path or 'the model'}", (type(module), getattr(type(module), "forward", None))
        held = [dict(vars(module)), *(getattr(module, kind) for kind in values.OF_MODULES)]
        for name in (*values.OF_MODULES, *(hooks for hooks in values.HOOKS if not held[0].get(hooks))):
            held[0].pop(name, None)
        yield from ((before + name, value) for part in held for name, value in part.items())


class _Here(values.Writer):
    """Writes within one process: an object that has no certain form is written as itself. Owns the digest under way."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, SimpleNamespace(update=lambda data: self._digest.update(data)))
        self._digest = hashlib.sha256()

    def digest(self, value: Any) -> bytes:
        self._digest = hashlib.sha256()
        try:
            self.dump(value)
        except values.UNWRITABLE:
            self.held.append(value)
            return str(id(value)).encode()
        return self._digest.digest()

    def persistent_id(self, obj: Any) -> Any:
        """How an object is written that pickle would write otherwise; None for all others."""
        kind = type(obj)
        if isinstance(obj, type):
            self.held.append(obj)
            return "class", id(obj)
        if isinstance(obj, FunctionType):
            return self._itself(obj)
        if isinstance(obj, MethodType):
            return "method", obj.__self__, obj.__func__
        if kind in (set, frozenset):
            self.held.extend(obj)
            return kind.__name__, sorted(map(repr, obj) if _is_plain(obj) else map(id, obj))
        try:
            found = super().persistent_id(obj)
        except Uncertain:
            return self._itself(obj)
        is_known = found is not None or kind in (*values.HASHABLE, list, tuple, dict) or isinstance(obj, enum.Enum)
        return found if is_known or _is_shown(obj) else self._itself(obj, is_new=True)

    def reducer_override(self, obj: Any) -> Any:
        return NotImplemented

    def _itself(self, obj: Any, *, is_new: bool = False) -> tuple[Any, ...]:
        """The object, and its Python-visible state."""
        if not is_new and (place := self.seen.get(id(obj))) is not None:
            return "again", place
        self.seen.setdefault(id(obj), len(self.seen))
        self.held.append(obj)
        if isinstance(obj, FunctionType):
            cells = [_content_of(cell) for cell in obj.__closure__ or ()]
            return "function", id(obj), id(obj.__code__), cells, obj.__defaults__, obj.__kwdefaults__, vars(obj)
        return "object", id(obj), dict(getattr(obj, "__dict__", {}))

    def _name_of(self, module: nn.Module) -> Any:
        return self._modules[id(module)] if id(module) in self._modules else self._itself(module)

    def _tensor(self, value: Tensor) -> tuple[Any, ...]:
        try:
            return super()._tensor(value)
        except Uncertain:
            return (
                "tensor",
                id(value),
                value._version,
                tuple(value.shape),
                value.dtype,
                value.requires_grad,
                vars(value),
            )


def _is_plain(members: Any) -> bool:
    return all(type(member) in values.HASHABLE for member in members)


def _is_shown(obj: Any) -> bool:
    """Whether pickle shows all of its state, by no code of a user's."""
    if any(isinstance(getattr(type(obj), name, None), FunctionType) for name in values.PICKLED_BY):
        return False
    try:
        obj.__reduce_ex__(4)
    except Exception:
        return False
    return True


def _content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty one
        return None
