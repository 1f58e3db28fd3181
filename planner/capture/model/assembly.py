"""How one tensor is made of others: a tree of moves of elements, as plain data.

    Cat(0, (View((1, 6, 4), Source("experts.0.up", (6, 4))), View((1, 6, 4), Source("experts.1.up", (6, 4)))))

A part of the tensor needs only some elements of the sources: ``runtime.checkpoint.hub_tensors`` reads just these. A
Call is any other op; it runs on whole tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

Shape = tuple[int, ...]
Pair = tuple["Assembly", "Assembly"]  # a tensor, and how it is made the other way round


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that is given."""

    name: str
    shape: Shape

    def fault(self) -> str:
        return "" if isinstance(self.name, str) else "a name"


@dataclass(frozen=True, slots=True)
class Cat:
    dim: int
    parts: tuple[Assembly, ...]

    @property
    def shape(self) -> Shape:
        first = self.parts[0].shape
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :])

    def undone(self, value: Assembly) -> Iterator[Pair]:
        start = 0
        for each in self.parts:
            stop = start + each.shape[self.dim]
            yield each, part(value, self.dim, start, stop)
            start = stop

    def fault(self) -> str:
        rest = {(*each.shape[: self.dim], *each.shape[self.dim + 1 :]) for each in self.parts}
        return "" if 0 <= self.dim < len(self.shape) and len(rest) == 1 else "parts of other shapes"


@dataclass(frozen=True, slots=True)
class Slice:
    dim: int
    start: int
    stop: int
    whole: Assembly

    @property
    def shape(self) -> Shape:
        whole = self.whole.shape
        return (*whole[: self.dim], self.stop - self.start, *whole[self.dim + 1 :])

    def fault(self) -> str:
        return "" if self.dim >= 0 and 0 <= self.start < self.stop <= self.whole.shape[self.dim] else "a slice"


@dataclass(frozen=True, slots=True)
class Permute:
    dims: Shape
    whole: Assembly

    @property
    def shape(self) -> Shape:
        whole = self.whole.shape
        return tuple(whole[dim] for dim in self.dims)

    def undone(self, value: Assembly) -> Iterable[Pair]:
        return [(self.whole, Permute(inverse(self.dims), value))]

    def fault(self) -> str:
        return "" if sorted(self.dims) == [*range(len(self.whole.shape))] else "a permutation"


@dataclass(frozen=True, slots=True)
class View:
    """The elements in the same order with another shape."""

    shape: Shape
    whole: Assembly

    def undone(self, value: Assembly) -> Iterable[Pair]:
        return [(self.whole, view(value, self.whole.shape))]

    def fault(self) -> str:
        return "" if prod(self.shape) == prod(self.whole.shape) else "another number of elements"


@dataclass(frozen=True, slots=True)
class Call:
    """Result number ``index`` of an op on full tensors; ``args`` holds assemblies, numbers and tuples of these."""

    op: str
    args: tuple[Any, ...]
    index: int
    shape: Shape

    def fault(self) -> str:
        return "" if isinstance(self.op, str) and type(self.index) is int else "a call"


Assembly = Source | Cat | Slice | Permute | View | Call
# Their names are keys of saves and plan files: a class that is renamed makes earlier ones unreadable.
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Source, Cat, Slice, Permute, View, Call)}


def cat(parts: Iterable[Assembly], dim: int) -> Assembly:
    found = tuple(parts)
    return found[0] if len(found) == 1 else Cat(dim, found)


def part(whole: Assembly, dim: int, start: int, stop: int) -> Assembly:
    return whole if (start, stop) == (0, whole.shape[dim]) else Slice(dim, start, stop, whole)


def view(whole: Assembly, shape: Shape) -> Assembly:
    whole = whole.whole if isinstance(whole, View) else whole
    return whole if whole.shape == shape else View(shape, whole)


def nodes(made: Any) -> Iterator[Assembly]:
    """Yield an assembly, or the assemblies in a tuple, with everything that they are made of, in order."""
    if isinstance(made, Assembly):
        yield made
        made = tuple(getattr(made, field.name) for field in fields(made))
    for each in made if isinstance(made, tuple) else ():
        yield from nodes(each)


def sources(made: Any) -> Iterator[Source]:
    return (each for each in nodes(made) if isinstance(each, Source))


def read_whole(made: Iterable[Assembly]) -> dict[str, int]:
    """Return op → elements of the tensors that it reads and of which no part can be made alone."""
    found: dict[str, int] = {}
    for call in (each for one in made for each in nodes(one) if isinstance(each, Call)):
        found[call.op] = found.get(call.op, 0) + sum(prod(source.shape) for source in sources(call.args))
    return found


def inverted(made: Mapping[str, Assembly]) -> dict[str, Assembly]:
    """Return each source as an assembly of the tensors made of it; without sources of which elements are lost."""
    slices: dict[Assembly, dict[int, tuple[Slice, Assembly]]] = {}
    found: dict[str, Assembly] = {}
    waiting: deque[Pair] = deque((assembly, Source(name, assembly.shape)) for name, assembly in made.items())
    while waiting:
        while waiting:
            assembly, value = waiting.popleft()
            if isinstance(assembly, Source):
                found[assembly.name] = value
            elif isinstance(assembly, Slice):
                slices.setdefault(assembly.whole, {})[assembly.start] = assembly, value
            elif not isinstance(assembly, Call):
                waiting.extend(assembly.undone(value))
        waiting.extend((whole, value) for whole in [*slices] if (value := _joined(whole, slices)) is not None)
    return found


def _joined(whole: Assembly, slices: dict[Assembly, dict[int, tuple[Slice, Assembly]]]) -> Assembly | None:
    """Return ``whole`` as a concatenation of its slices; None until they cover it."""
    held = [slices[whole][start] for start in sorted(slices[whole])]
    dims, stop = {one.dim for one, _ in held}, 0
    for one, _ in held:
        stop = one.stop if one.start == stop else -1
    if len(dims) > 1 or stop != whole.shape[held[0][0].dim]:
        return None
    del slices[whole]
    return cat((value for _, value in held), dims.pop())


def inverse(dims: Shape) -> Shape:
    return tuple(sorted(range(len(dims)), key=dims.__getitem__))


def to_json(made: Any) -> Any:
    """Return lists, numbers and strings; an assembly begins with its kind."""
    if isinstance(made, tuple):
        return [to_json(each) for each in made]
    if type(made).__name__ in _KINDS:
        return {type(made).__name__: [to_json(getattr(made, field.name)) for field in fields(made)]}
    return made


def of_json(given: Any) -> Assembly:
    """Return the assembly. Raises ValueError for anything that ``to_json`` does not make of an assembly."""
    found = _of_json(given)
    if not isinstance(found, Assembly):
        raise ValueError("no assembly of a tensor")
    return found


def _of_json(given: Any) -> Any:
    if isinstance(given, list):
        return tuple(map(_of_json, given))
    if not isinstance(given, dict):
        return given
    try:
        ((kind, content),) = given.items()
        made = _KINDS[kind](*map(_of_json, content))
        is_sized = all(type(size) is int and size >= 0 for size in made.shape)
        fault = made.fault() if is_sized else "a shape"
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"no assembly of a tensor: {error}") from None
    if fault:
        raise ValueError(f"no assembly of a tensor: {fault}")
    return made
