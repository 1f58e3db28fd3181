"""One call as rules read it: its tensor operands in order, their sizes as plain numbers, its arguments by name.

A size that is a symbol (rows that data selects) stands as a large prime, which divides nothing else. The layers of a
model repeat calls, so what holds of one is computed once for all with its key.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
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
