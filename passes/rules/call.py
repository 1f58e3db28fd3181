"""One call as rules read it: its tensor operands in order, their sizes as plain numbers, its arguments by name.

A size that is a symbol (rows that data selects) stands as a large prime, which divides nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from passes.program.ops.aten import arguments, named, tensors_of

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
        """The operand that an argument names; None if it is absent."""
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
    """The tensors that a call reads, one for each occurrence, in the order of its schema."""
    schema = getattr(node.target, "_schema", None)
    given = arguments(node)
    ordered = [given[a.name] for a in schema.arguments if a.name in given] if schema else (node.args, node.kwargs)
    found: list[fx.Node] = []
    fx.map_arg(ordered, lambda n: found.append(n) if next(tensors_of(n), None) is not None else None)
    return tuple(found)


def _sizes(value: torch.Tensor, symbols: dict[Any, int]) -> Shape:
    return tuple(n if isinstance(n, int) else _of_symbols(n, symbols) for n in value.shape)


def _of_symbols(size: Any, symbols: dict[Any, int]) -> int:
    expression = size.node.expr
    for symbol in sorted(expression.free_symbols, key=str):
        symbols.setdefault(symbol, PRIMES[len(symbols) % len(PRIMES)])
    return int(expression.subs(symbols))
