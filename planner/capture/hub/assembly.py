"""How one tensor is made of others: a tree of moves of elements, as plain data.

    Cat(0, (View((1, 6, 4), Source("experts.0.up", (6, 4))), View((1, 6, 4), Source("experts.1.up", (6, 4)))))

A part of the tensor needs only some elements of the sources: ``runtime.checkpoint.assembled`` reads just these. A Call
is any other op; it runs on whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that is given."""

    name: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Cat:
    dim: int
    parts: tuple[Assembly, ...]

    @property
    def shape(self) -> Shape:
        first = self.parts[0].shape
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :])


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


@dataclass(frozen=True, slots=True)
class Permute:
    dims: Shape
    whole: Assembly

    @property
    def shape(self) -> Shape:
        whole = self.whole.shape
        return tuple(whole[dim] for dim in self.dims)


@dataclass(frozen=True, slots=True)
class View:
    """The elements in the same order under another shape."""

    shape: Shape
    whole: Assembly


@dataclass(frozen=True, slots=True)
class Call:
    """Result number ``index`` of an op on whole tensors; ``args`` holds assemblies, numbers and tuples of these."""

    op: str
    args: tuple[Any, ...]
    index: int
    shape: Shape


Assembly = Source | Cat | Slice | Permute | View | Call
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Source, Cat, Slice, Permute, View, Call)}


def cat(parts: Iterable[Assembly], dim: int) -> Assembly:
    found = tuple(parts)
    return found[0] if len(found) == 1 else Cat(dim, found)


def part(whole: Assembly, dim: int, start: int, stop: int) -> Assembly:
    return whole if (start, stop) == (0, whole.shape[dim]) else Slice(dim, start, stop, whole)


def view(whole: Assembly, shape: Shape) -> Assembly:
    whole = whole.whole if isinstance(whole, View) else whole
    return whole if whole.shape == shape else View(shape, whole)


def sources(made: Any) -> Iterator[Source]:
    """Every source of an assembly, or of a tuple of them, in order."""
    if isinstance(made, Source):
        yield made
    elif isinstance(made, tuple):
        for each in made:
            yield from sources(each)
    elif isinstance(made, Cat):
        yield from sources(made.parts)
    elif isinstance(made, Call):
        yield from sources(made.args)
    elif isinstance(made, (Slice, Permute, View)):
        yield from sources(made.whole)


def inverted(made: Mapping[str, Assembly]) -> dict[str, Assembly]:
    """Each source as an assembly of the tensors that are made of it; without one of which elements are lost."""
    slices: dict[Assembly, dict[int, tuple[Slice, Assembly]]] = {}
    found: dict[str, Assembly] = {}
    waiting = [(assembly, Source(name, assembly.shape)) for name, assembly in made.items()]
    while waiting:
        for assembly, value in waiting:
            _invert(assembly, value, slices, found)
        waiting = [(whole, value) for whole in [*slices] if (value := _joined(whole, slices)) is not None]
    return found


def _invert(
    made: Assembly, value: Assembly, slices: dict[Assembly, dict[int, tuple[Slice, Assembly]]], found: dict[str, Any]
) -> None:
    if isinstance(made, Source):
        found[made.name] = value
    elif isinstance(made, Cat):
        start = 0
        for each in made.parts:
            stop = start + each.shape[made.dim]
            _invert(each, part(value, made.dim, start, stop), slices, found)
            start = stop
    elif isinstance(made, Slice):
        slices.setdefault(made.whole, {})[made.start] = (made, value)
    elif isinstance(made, Permute):
        _invert(made.whole, Permute(inverse(made.dims), value), slices, found)
    elif isinstance(made, View):
        _invert(made.whole, view(value, made.whole.shape), slices, found)


def _joined(whole: Assembly, slices: dict[Assembly, dict[int, tuple[Slice, Assembly]]]) -> Assembly | None:
    """``whole``, of slices that now cover it."""
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
    """Lists, numbers and strings; an assembly begins with its kind."""
    if isinstance(made, tuple):
        return [to_json(each) for each in made]
    if type(made).__name__ in _KINDS:
        return {type(made).__name__: [to_json(getattr(made, field.name)) for field in fields(made)]}
    return made


def of_json(given: Any) -> Assembly:
    """Raises ValueError for anything that ``to_json`` does not give of an assembly."""
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
        fault = _fault(made)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"no assembly of a tensor: {error}") from None
    if fault:
        raise ValueError(f"no assembly of a tensor: {fault}")
    return made


def _fault(made: Assembly) -> str:
    shape = made.shape
    if not all(type(size) is int and size >= 0 for size in shape):
        return "a shape"
    if isinstance(made, Source):
        return "" if isinstance(made.name, str) else "a name"
    if isinstance(made, Cat):
        rest = {(*each.shape[: made.dim], *each.shape[made.dim + 1 :]) for each in made.parts}
        return "" if 0 <= made.dim < len(shape) and len(rest) == 1 else "parts of other shapes"
    if isinstance(made, Slice):
        return "" if made.dim >= 0 and 0 <= made.start < made.stop <= made.whole.shape[made.dim] else "a slice"
    if isinstance(made, Permute):
        return "" if sorted(made.dims) == [*range(len(made.whole.shape))] else "a permutation"
    if isinstance(made, View):
        return "" if prod(shape) == prod(made.whole.shape) else "another number of elements"
    return "" if isinstance(made.op, str) and type(made.index) is int else "a call"
