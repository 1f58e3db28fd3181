"""The rule of one call: its factors, and the places of each.

    linear(x[b, s, i], W[o, i])     b, s, o   each index is computed by itself
                                    i         summed over: it stands in both operands and not in the result
    softmax(x[b, s], -1)            b         each by itself          s      mixed
    x[h·d] seen as [h, d]           h, d      each by itself; in x they share a dim, h with an inner stride of d

Factors as in Shardy's sharding rules (openxla.org/shardy): every dim of an operand or of the result is the product of
the factors that stand there. A dim of size 1 that is broadcast has none.

Rules read of a call its tensor operands in order, their sizes as plain numbers, and its arguments by name. A size that
is a symbol (rows that data selects) stands as a large prime, which divides nothing else. The layers of a model repeat
calls, so what holds of one is computed once for all with its key.
"""

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from passes.program.ops.aten import arguments, named, nodes_in, tensors_of

Shape = tuple[int, ...]
PRIMES = (1_000_003, 1_000_033, 1_000_037, 1_000_039, 1_000_081, 1_000_099, 1_000_117, 1_000_121)


@dataclass(frozen=True)
class Call:
    """``operands``: one for each occurrence, in the order of the schema. ``result``: of a tuple its first tensor's."""

    node: fx.Node
    operands: tuple[fx.Node, ...]
    shapes: tuple[Shape, ...]
    result: Shape

    @cached_property
    def given(self) -> dict[str, Any]:
        return named(self.node)

    def position(self, name: str) -> int | None:
        """Return the operand that an argument names; None if it is absent."""
        value = self.given.get(name)
        return self.operands.index(value) if isinstance(value, fx.Node) and value in self.operands else None

    def dims(self, *names: str) -> frozenset[int] | None:
        """Dims of the first operand that an argument lists; None if all these arguments are absent."""
        value = next((v for n in names if (v := self.given.get(n)) is not None), None)
        if value is None or value == []:
            return None
        ndim = max(1, len(self.shapes[0]))
        return frozenset(int(d) % ndim for d in (value if isinstance(value, (list, tuple)) else [value]))


def call_of(node: fx.Node) -> Call | None:
    """None for a node that computes no tensor."""
    result = next(tensors_of(node), None)
    if node.op != "call_function" or result is None:
        return None
    operands = operands_of(node)
    symbols: dict[Any, int] = {}
    shapes = tuple(_sizes(next(tensors_of(n)), symbols) for n in operands)
    return Call(node, operands, shapes, _sizes(result, symbols))


def operands_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the tensors that a call reads, one for each occurrence, in the order of its schema."""
    found, ordered = list[fx.Node](), node.args
    if node.kwargs:
        schema, given = getattr(node.target, "_schema", None), arguments(node)
        ordered = [given[a.name] for a in schema.arguments if a.name in given] if schema else (node.args, node.kwargs)
    for value in ordered:
        if isinstance(value, fx.Node):
            found.append(value)
        elif isinstance(value, (tuple, list, dict)):
            found += nodes_in(value)
    return tuple(n for n in found if next(tensors_of(n), None) is not None)


def _sizes(value: torch.Tensor, symbols: dict[Any, int]) -> Shape:
    return tuple(n if isinstance(n, int) else _of_symbols(n, symbols) for n in value.shape)


def _of_symbols(size: Any, symbols: dict[Any, int]) -> int:
    expression = size.node.expr
    for symbol in sorted(expression.free_symbols, key=str):
        symbols.setdefault(symbol, PRIMES[len(symbols) % len(PRIMES)])
    return int(expression.subs(symbols))


def key_of(node: fx.Node) -> Hashable | None:
    """Op, arguments, shapes and dtypes; calls with equal keys differ in the values of their tensors alone.

    None for a call of symbolic sizes, or with an argument that cannot be compared.
    """
    numbers = dict[fx.Node, int]()  # a call with one operand twice is another than one with two
    args, kwargs = _read(node.args, numbers), _read(tuple(node.kwargs.items()), numbers) if node.kwargs else ()
    key = (node.target, args, kwargs, _form_of(node.meta.get("val")))
    try:
        hash(key)
    except TypeError:  # a symbol is not hashable
        return None
    return key


def _read(value: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return numbers.setdefault(value, len(numbers)), _form_of(value.meta.get("val"))
    if isinstance(value, (list, tuple)):
        return tuple([_read(v, numbers) for v in value])
    return value if value is None else (type(value), value)  # 1 == True == 1.0


def _form_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return tuple([_form_of(v) for v in value]) if isinstance(value, (list, tuple)) else (type(value), value)


RESULT = -1  # in place of an operand's position; of a tuple its first tensor


class Role(Enum):
    """The relation between an index of a factor and the result. The text is the mark in the notation."""

    EACH = ""  # computed by itself
    SUM = "+"  # the results of all indices are added up
    MIX = "^"  # anything else


@dataclass(frozen=True, slots=True)
class Place:
    """One dim of an operand, or of the result; there the index of a factor is (position // inner) % size."""

    operand: int
    dim: int
    inner: int = 1


@dataclass(frozen=True, slots=True)
class Factor:
    role: Role
    size: int
    places: tuple[Place, ...]

    def at(self, operand: int) -> Place | None:
        """Its place in an operand. Factors that an operand holds twice (a diagonal) have no rule."""
        return next((p for p in self.places if p.operand == operand), None)


@dataclass(frozen=True, slots=True)
class OpRule:
    """``unread``: operands of which only shape and dtype count, as of ``zeros_like``.

    ``linear``: sets of operands in which the call is linear while the others stay; those of one set are added up.
    """

    factors: tuple[Factor, ...]
    unread: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()

    def along(self, operand: int, dim: int) -> list[Factor]:
        """Return the factors of one dim, the innermost first."""
        found = [(p.inner, f) for f in self.factors if (p := f.at(operand)) is not None and p.dim == dim]
        return [f for _, f in sorted(found, key=lambda pair: pair[0])]

    def is_alone(self, operand: int, dim: int) -> bool:
        """Return whether each index of a dim, its rows, is computed by itself."""
        return all(factor.role is Role.EACH for factor in self.along(operand, dim))

    def sole(self, operand: int, dim: int) -> Factor | None:
        """Return the factor that is all of a dim; None if it has several, or none."""
        found = self.along(operand, dim)
        return found[0] if len(found) == 1 else None

    def carried(self, source: int, dim: int, inner: int, size: int, target: int) -> tuple[int, int] | None:
        """Return (dim, inner) in another operand, or in the result, of the things that (position // inner) % size
        counts in ``dim`` of ``source``; None if they are missing, or not together. One thing alone is that of a factor
        of one."""
        step, end, found = 1, inner * size, []
        for factor in self.along(source, dim):
            first, last = max(inner, step), min(end, step * factor.size)
            if first < last or factor.size == size == 1:
                place = factor.at(target)
                if place is None or first % step or last % first or step * factor.size % last:
                    return None
                found.append((place.dim, place.inner * (first // step), last // first))
            step *= factor.size
        joined = all(b[:2] == (a[0], a[1] * a[2]) for a, b in pairwise(found))
        return found[0][:2] if found and joined and step % end == 0 else None


EACH, SUM, MIX = Role.EACH, Role.SUM, Role.MIX


class Factors:
    """Adds factors of whole dims; ``done`` gives every dim that none was added for a mixed one of its own."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.found: list[Factor] = []

    def size(self, operand: int, dim: int) -> int:
        return (self.call.result if operand == RESULT else self.call.shapes[operand])[dim]

    def ndim(self, operand: int) -> int:
        return len(self.call.result if operand == RESULT else self.call.shapes[operand])

    def add(self, role: Role, *places: tuple[int | None, int]) -> None:
        """One factor of whole dims: those of the size that most have; an operand that is not given has no place.

        A dim of size 1 among larger ones is broadcast.
        """
        known = [(o, d) for o, d in places if o is not None and -self.ndim(o) <= d < self.ndim(o)]
        if known:
            size = max(self.size(o, d) for o, d in known)
            held = [Place(o, d % self.ndim(o)) for o, d in known if self.size(o, d) == size]
            self.found.append(Factor(role, size, tuple(held)))

    def done(self, unread: Iterable[int] = ()) -> OpRule:
        """Give each dim without a factor a mixed one of its own, unless it is broadcast."""
        ignored = frozenset(unread)
        taken = {(p.operand, p.dim) for f in self.found for p in f.places}
        rest = [
            Factor(MIX, self.size(o, d), (Place(o, d),))
            for o in (*range(len(self.call.shapes)), RESULT)
            for d in range(self.ndim(o))
            if (o, d) not in taken and self.size(o, d) != 1 and o not in ignored
        ]
        return OpRule((*self.found, *rest), ignored)


def aligned(call: Call, operands: Collection[int] | None = None, roles: dict[int, Role] | None = None) -> Factors:
    """Operands broadcast to the result, from the last dim on; ``roles``: of dims of the result that are not EACH."""
    factors = Factors(call)
    read = range(len(call.shapes)) if operands is None else operands
    ndim = len(call.result)
    for dim in range(ndim):
        role = (roles or {}).get(dim, EACH)
        factors.add(role, (RESULT, dim), *((o, dim - ndim) for o in read if len(call.shapes[o]) >= ndim - dim))
    return factors
