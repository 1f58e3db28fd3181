"""Converts decisions to JSON and tensors, and back. Nothing in a file can run code.

    number, text, None              unchanged
    list                            [..]
    anything else                   {kind: content}: tuple, dict, dtype, node, like, tensor, graph, enum, object, …

An object is a dataclass, written once and referred to by number. Classes, functions and ops must be those of
planner.files.allowed: writing any other, such as a user's function, raises Unstorable, and reading one NotAllowed.
Only identifiers of a file reach the source that torch.fx writes for a graph.
"""

import cmath
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from passes.program.program import Unwritten
from planner.files import allowed
from planner.files.allowed import checked

PLAIN = (bool, int, float, str, type(None))
OF_TORCH = {"dtype": torch.dtype, "device": torch.device, "layout": torch.layout, "memory": torch.memory_format}
NAMES_OF_TORCH = {
    kind: {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, of_kind)}
    for kind, of_kind in OF_TORCH.items()
}
NOT_FINITE = {str(value): value for value in (math.inf, -math.inf, math.nan)}
OPS = ("placeholder", "call_function", "output")
MOST_INLINE = 40  # characters; a longer text is written once and referred to by number


class Unstorable(Exception):
    """Raised for a value that cannot be written to a file."""


class Writer:
    """Converts values to JSON; collects ``objects``, ``texts`` and ``tensors``. ``dropped``: keys of node.meta."""

    def __init__(self, dropped: Collection[str] = ()) -> None:
        self.dropped = dropped
        self.objects: list[Any] = []
        self.texts: dict[str, int] = {}
        self.tensors: dict[str, Tensor] = {}
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # keeps written objects alive, because ``_numbers`` is keyed by id()

    def write(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > MOST_INLINE:
            return {"text": self.texts.setdefault(value, len(self.texts))}
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        if isinstance(value, complex) and cmath.isfinite(value):
            return {"complex": [value.real, value.imag]}
        if type(value) in PLAIN:
            return value
        if isinstance(value, Enum):
            return {"enum": [*_name_of(type(value), allowed.enum), value.name]}
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, fx.Node):
            return {"node": value.name}
        if isinstance(value, fx.GraphModule):
            return {"graph": [self._node(node) for node in value.graph.nodes]}
        if is_dataclass(value) and not isinstance(value, type):
            return {"object": self._object(value)}
        return self._container(value)

    def _container(self, value: Any) -> Any:
        for kind, of_kind in OF_TORCH.items():
            if isinstance(value, of_kind):
                return {kind: str(value).removeprefix("torch.")}
        if isinstance(value, slice):
            return {"slice": [self.write(part) for part in (value.start, value.stop, value.step)]}
        if isinstance(value, list):
            return [self.write(part) for part in value]
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return {"tuple": [self.write(part) for part in value]}
        if isinstance(value, (set, frozenset)):
            kind = "set" if isinstance(value, set) else "frozenset"
            return {kind: [self.write(part) for part in sorted(value, key=str)]}
        if isinstance(value, Mapping):
            return {"dict": [[self.write(key), self.write(part)] for key, part in value.items()]}
        raise Unstorable(f"a {type(value).__name__} has no form on disk")

    def _object(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            content = [self.write(getattr(value, field.name)) for field in fields(value) if field.init]
            number = self._numbers[id(value)] = len(self.objects)
            self.objects.append([*_name_of(type(value), allowed.record), content])
            self._alive.append(value)
        return number

    def _tensor(self, value: Tensor) -> Any:
        dtype = str(value.dtype).removeprefix("torch.")
        if isinstance(value, FakeTensor) or value.is_meta:
            place = [list(value.shape), list(value.stride()), value.storage_offset()]
            return {"like": [*place, dtype, value.requires_grad]}
        name = str(len(self.tensors))
        self.tensors[name] = value.detach().contiguous().clone()
        return {"tensor": name}

    def _node(self, node: fx.Node) -> list[Any]:
        target = self._function(node) if node.op == "call_function" else str(node.target)
        marks = {key: value for key, value in node.meta.items() if key not in self.dropped}
        if node.op not in OPS:
            raise Unstorable(f"{node.name} is no value of a plan: {node.op}")
        for key, value in marks.items():
            allowed.check_mark(key, value)
        meta = [[key, self.write(value)] for key, value in marks.items()]
        return [node.op, node.name, target, self.write(node.args), self.write(node.kwargs), meta]

    def _function(self, node: fx.Node) -> list[str]:
        target: Any = node.target
        if isinstance(target, OpOverload):
            if not allowed.is_allowed(target):
                raise Unstorable(f"{node.name} calls {target}, for which there is no rule (meshwright.rule)")
            return ["op", str(target)]
        if target is operator.getitem:
            return ["getitem", ""]
        name = str(getattr(target, "__module__", "")), str(getattr(target, "__qualname__", ""))
        try:
            if allowed.function(*name) is target:
                return list(name)
        except allowed.NotAllowed:
            pass
        raise Unstorable(f"{node.name} calls {target}, a function of your own")


class Reader:
    """Restores values that a Writer wrote. Damaged input may raise any Exception."""

    def __init__(self, objects: list[Any], texts: list[str], tensors: Mapping[str, Tensor]) -> None:
        self.texts, self.tensors = texts, tensors
        self.nodes: dict[str, fx.Node] = {}
        self._objects: list[Any] = []
        for module, name, content in objects:
            self._objects.append(self._record(allowed.record(module, name), content))

    def read(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.read(part) for part in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        return READS[kind](self, content)

    def _record(self, cls: type, content: list[Any]) -> Any:
        names = [field.name for field in fields(cls) if field.init]
        return checked(cls, dict(zip(names, map(self.read, content), strict=True)))

    def _like(self, like: list[Any]) -> Tensor:
        shape, stride, offset, dtype, requires_grad = like
        last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        whole = torch.empty((max(last, 0),), dtype=_of_torch("dtype", dtype), device="meta")
        return whole.as_strided(shape, stride, offset).requires_grad_(requires_grad)

    def _graph(self, rows: list[Any]) -> fx.GraphModule:
        graph, self.nodes = fx.Graph(), {}
        for op, name, target, args, kwargs, meta in rows:
            arguments: Any = self.read(args), self.read(kwargs)
            _check_call(op, *arguments)
            function = _function(*target) if op == "call_function" else allowed.of_source(target)
            node = graph.create_node(op, function, *arguments, name=allowed.of_source(name))
            if node.name != name:
                raise ValueError(f"two nodes are called {name}")
            node.meta = {key: self.read(value) for key, value in meta}
            for key, value in node.meta.items():
                allowed.check_mark(key, value)
            self.nodes[name] = node
        return Unwritten({}, graph)


READS: dict[str, Callable[[Reader, Any], Any]] = {
    "text": lambda reader, number: reader.texts[number],
    "node": lambda reader, name: reader.nodes[name],
    "object": lambda reader, number: reader._objects[number],
    "tensor": lambda reader, name: reader.tensors[name],
    "like": Reader._like,
    "graph": Reader._graph,
    "tuple": lambda reader, parts: tuple(map(reader.read, parts)),
    "set": lambda reader, parts: set(map(reader.read, parts)),
    "frozenset": lambda reader, parts: frozenset(map(reader.read, parts)),
    "dict": lambda reader, pairs: {reader.read(key): reader.read(value) for key, value in pairs},
    "slice": lambda reader, parts: slice(*map(reader.read, parts)),
    "float": lambda reader, text: NOT_FINITE[text],
    "complex": lambda reader, parts: complex(*parts),
    "enum": lambda reader, content: allowed.enum(*content[:2])[content[2]],
    **{kind: (lambda reader, name, kind=kind: _of_torch(kind, name)) for kind in OF_TORCH},
}


def _name_of(cls: type, of_table: Callable[[str, str], Any]) -> tuple[str, str]:
    try:
        of_table(cls.__module__, cls.__qualname__)
    except allowed.NotAllowed:
        raise Unstorable(f"a {cls.__module__}.{cls.__qualname__} has no form on disk") from None
    return cls.__module__, cls.__qualname__


def _function(module: str, name: str) -> Any:
    if module == "getitem":
        return operator.getitem
    return allowed.op(name) if module == "op" else allowed.function(module, name)


def _check_call(op: Any, args: Any, kwargs: Any) -> None:
    """Raise ValueError for arguments that no node of a plan may have: torch.fx writes arguments into source."""
    if op not in OPS or not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise ValueError(f"{op} is no call of a plan")
    for name in kwargs:
        allowed.of_source(name)
    for value in (*args, *kwargs.values()):
        _check_argument(value)


def _check_argument(value: Any) -> None:
    if type(value) in (list, tuple):
        for part in value:
            _check_argument(part)
    elif type(value) is slice:
        _check_argument([value.start, value.stop, value.step])
    elif type(value) is complex and cmath.isfinite(value):
        return  # torch.fx would write NaN as a name
    elif type(value) not in PLAIN and not isinstance(value, (fx.Node, *OF_TORCH.values())):
        raise ValueError(f"a {type(value).__name__} is no argument of a call")


def _of_torch(kind: str, name: str) -> Any:
    return torch.device(name) if kind == "device" else NAMES_OF_TORCH[kind][name]
