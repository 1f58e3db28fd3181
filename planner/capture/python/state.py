"""The Python state that a forward keeps from one call to the next: export runs it once, and the values that it read are
frozen.

    self.calls += 1                          a number: captured again with another value
    self.log.append(…); len(self.log)        a list, dict, set or plain object: captured again as the forward left it
    self.memory = h                          a tensor made of the batch: captured again with another tensor
    self.mask = torch.ones(t, t).tril()      a tensor of constants: kept with its value

Checks the attributes of modules and their content, the cells of functions among them, class attributes and globals of
the user's modules, and generators. If a value changed, a call of a later state is recorded; only if it differs, a
second capture is made, and if that differs too, the forward depends on earlier calls and is refused
(planner.capture.python.watch). All values are restored.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from planner.capture.model.exchange import tensors_in
from planner.capture.python.modules import content_of, own_modules, users_modules

FAR = 1_000_003  # a prime: every count modulo something small changes
MORE = 10  # further calls for a list that grows
NEAR = (*range(1, 11), 99, 999)  # further calls at which a schedule may turn
MOST = 4096  # entries of a container that are looked at
_MACHINERY = {n for n in vars(nn.Module()) if n != "training"}
_MISSING = object()
_CONTAINERS = (dict, list, deque, set)
_DRAWN = "state of the generator"
Access = tuple[Callable[[], dict[Any, Any]], Callable[[dict[Any, Any]], None]]


@dataclass(eq=False)
class Holder:
    """An object that keeps values by key: ``read`` returns them, ``write`` restores them.

    ``owner`` is a module's path, ``name`` the attribute that holds it.
    """

    owner: str
    name: str
    module: nn.Module | None
    read: Callable[[], dict[Any, Any]]
    write: Callable[[dict[Any, Any]], None]
    before: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """One value that the forward changed."""

    holder: Holder
    key: Any
    before: Any
    after: Any

    @property
    def what(self) -> str:
        name = self.holder.name or str(self.key)
        if self.holder.module is None:
            name = f"{name}.{self.key}"
        return f"{self.holder.owner}.{name}" if self.holder.owner else name

    @property
    def is_a_draw(self) -> bool:
        """Return whether it is the state of a random generator: the next draw differs."""
        return self.key == _DRAWN

    @property
    def is_new(self) -> bool:
        """Return whether a call adds it, to a list or a dict."""
        return self.before is _MISSING and bool(self.holder.name)

    @property
    def is_a_number(self) -> bool:
        return _counts(self.before, self.after)

    @property
    def is_made(self) -> bool:
        """Return whether the current value differs from that before."""
        return not _same(self.before, self.holder.read().get(self.key, _MISSING))


class PythonState:
    """A snapshot of the Python state of ``model``, taken at construction."""

    def __init__(self, model: nn.Module) -> None:
        self._holders = list(_Walk(model).holders())
        for holder in self._holders:
            holder.before = holder.read()
        held = [(k, v) for module in model.modules() for k, v in vars(module).items() if k in _MACHINERY]
        self._hooks = [(table, set(table)) for name, table in held if "_hooks" in name and isinstance(table, dict)]

    def changes(self) -> list[Change]:
        found = []
        for holder in self._holders:
            now = holder.read()
            for key in dict.fromkeys([*holder.before, *now]):
                before, after = holder.before.get(key, _MISSING), now.get(key, _MISSING)
                if not _same(before, after):
                    found.append(Change(holder, key, before, after))
        return found

    def restore(self, *, with_hooks: bool = True) -> None:
        """Restore the snapshot; with ``with_hooks``, remove hooks that the forward has installed since."""
        for table, before in self._hooks if with_hooks else ():
            for key in [key for key in table if key not in before]:
                del table[key]
        for holder in self._holders:
            now = holder.read()
            if len(now) != len(holder.before) or not all(_same(holder.before.get(k, _MISSING), now[k]) for k in now):
                holder.write(holder.before)


def move_on(changes: list[Change], later: Callable[[Tensor], Tensor | None], by: int = FAR) -> None:
    """Put the model into its state after many more calls: numbers ``by`` further, and ``later(t)`` for each tensor. If
    that is None, the value before the call, which would have made the same.
    """
    for change in changes:
        values = change.holder.read()
        value = _moved(change.before, change.after, later, by)
        if value is _MISSING:
            values.pop(change.key, None)
        else:
            values[change.key] = value
        change.holder.write(values)


def _moved(before: Any, after: Any, later: Callable[[Tensor], Tensor | None], by: int) -> Any:
    if _counts(before, after):
        return after + by
    later_ones = {id(t): later(t) for t in tensors_in(after)}
    if any(value is None for value in later_ones.values()):
        return before
    return pytree.tree_map_only(Tensor, lambda t: later_ones[id(t)], after) if later_ones else after


def _counts(before: Any, after: Any) -> bool:
    return isinstance(after, (int, float)) and not isinstance(after, bool) and isinstance(before, (int, float))


def is_doubtful(change: Change, is_constant: Callable[[Tensor], bool]) -> bool:
    """Return whether a later call could read another value there than the first."""
    held = tensors_in(change.after)
    return not held or not all(map(is_constant, held))


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if isinstance(before, Tensor) or isinstance(after, Tensor) or type(before) is not type(after):
        return False
    if isinstance(before, (int, float, complex, str, bytes, bool, tuple, frozenset)):
        with suppress(Exception):
            return bool(before == after)
    if isinstance(before, dict) and len(before) <= MOST:  # export replaces containers by copies with the same content
        return before.keys() == after.keys() and all(_same(value, after[key]) for key, value in before.items())
    if isinstance(before, list) and len(before) <= MOST:
        return len(before) == len(after) and all(map(_same, before, after))
    return False


class _Walk:
    """Finds the holders that can keep a value, each object once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: set[int] = set()

    def holders(self) -> Iterator[Holder]:
        for path, module in self._model.named_modules():
            content = vars(module)
            yield Holder(path, "", module, lambda c=content: _without_machinery(c), lambda v, c=content: _refill(c, v))
            yield Holder(path, "", module, *_buffer_access(module))
            for name, value in list(_without_machinery(content).items()):
                yield from self._inside(path, name, module, value)
        kinds = dict.fromkeys(base for m in self._model.modules() for base in type(m).__mro__)
        for kind in kinds:
            if not _is_torchs(kind.__module__):
                yield _names_holder(kind, kind.__qualname__, (int, float, str, list, dict, Tensor))
        for python_module in users_modules(self._model):
            if not python_module.__name__.startswith("transformers"):  # thousands of names that nothing writes to
                yield _names_holder(python_module, python_module.__name__, (int, float))
        for python_module in own_modules(self._model):
            for name, value in list(vars(python_module).items()):
                yield from self._kept_by(f"{python_module.__name__}.{name}", value)

    def _kept_by(self, name: str, value: Any) -> Iterator[Holder]:
        """Yield a container in a global, and those in the defaults of a function, such as a memo of tensors."""
        if type(value) in _CONTAINERS and not name.rpartition(".")[2].startswith("__"):
            yield from self._inside("", name, None, value, depth=1)
        for default in (value.__defaults__ or ()) if type(value) is FunctionType else ():
            yield from self._kept_by(f"{name}(…)", default)

    def _inside(self, path: str, name: str, module: nn.Module | None, value: Any, depth: int = 4) -> Iterator[Holder]:
        """Yield holders inside an attribute's value."""
        if id(value) in self._seen or not depth or isinstance(value, (nn.Module, Tensor, type, ModuleType, str, bytes)):
            return
        access = _access(value)
        if access is None:
            return
        self._seen.add(id(value))
        holder = Holder(path, name, module, *access)
        yield holder
        with suppress(Exception):
            for key, inner in holder.read().items():
                inner_name = f"{name}[{key!r}]" if isinstance(value, dict) else f"{name}.{key}"
                yield from self._inside(path, inner_name, module, inner, depth - 1)


def _access(value: Any) -> Access | None:
    """Return how to read and write the content of a value; None for a value of unknown kind."""
    if isinstance(value, (dict, list, deque, set)) and len(value) > MOST:
        return None
    if isinstance(value, dict):
        return lambda: dict(value), lambda v: _refill(value, v)
    if isinstance(value, (list, deque)):
        return lambda: dict(enumerate(value)), lambda v: _replace(value, value.extend, v.values())
    if isinstance(value, set):
        return lambda: dict.fromkeys(value, True), lambda v: _replace(value, value.update, v)
    if isinstance(value, random.Random):
        return lambda: {_DRAWN: value.getstate()}, lambda v: value.setstate(v[_DRAWN])
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        bits: Any = value.bit_generator if isinstance(value, np.random.Generator) else value._bit_generator
        return lambda: {_DRAWN: _Bits(bits.state)}, lambda v: setattr(bits, "state", v[_DRAWN].state)
    if isinstance(value, FunctionType):
        cells = [c for c in value.__closure__ or () if content_of(c, _MISSING) is not _MISSING]
        return _cell_access(dict(zip(value.__code__.co_freevars, cells, strict=False)))
    content = getattr(value, "__dict__", None)
    if isinstance(content, dict) and not _is_torchs(type(value).__module__) and not callable(value):
        return lambda: dict(content), lambda v: _refill(content, v)
    return None


class _Bits(str):
    """The state of a NumPy generator; its text is compared."""

    def __new__(cls, state: Any) -> _Bits:
        made = super().__new__(cls, repr(state))
        made.state = state
        return made

    state: Any


def _buffer_access(module: nn.Module) -> Access:
    """Return the access to buffers without a value so far, or registered later; export watches the others."""
    buffers = module._buffers
    held = {name for name, buffer in buffers.items() if buffer is not None}

    def write(values: dict[Any, Any]) -> None:
        for name in [name for name in buffers if name not in held and name not in values]:
            del buffers[name]
        buffers.update(values)

    return lambda: {name: buffer for name, buffer in buffers.items() if name not in held}, write


def _cell_access(cells: dict[str, CellType]) -> Access:
    def write(values: dict[Any, Any]) -> None:
        for name, cell in cells.items():
            cell.cell_contents = values[name]

    return lambda: {name: cell.cell_contents for name, cell in cells.items()}, write


def _names_holder(owner: Any, name: str, kinds: tuple[type, ...]) -> Holder:
    """Return the holder of values of these ``kinds`` that have names in a class or a Python module."""

    def read() -> dict[Any, Any]:
        return {k: v for k, v in vars(owner).items() if isinstance(v, kinds) and not k.startswith("__")}

    def write(values: dict[Any, Any]) -> None:
        for name, value in values.items():
            setattr(owner, name, value)

    return Holder("", name, None, read, write)


def _without_machinery(content: dict[str, Any]) -> dict[Any, Any]:
    return {k: v for k, v in content.items() if k not in _MACHINERY}


def _refill(content: dict[Any, Any], values: dict[Any, Any]) -> None:
    """Set exactly ``values``, except entries of nn.Module itself."""
    for key in [k for k in content if k not in values and k not in _MACHINERY]:
        del content[key]
    content.update(values)


def _replace(held: Any, put: Callable[[list[Any]], None], values: Iterable[Any]) -> None:
    content = list(values)
    held.clear()
    put(content)


def _is_torchs(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "builtins")
