"""Kernels of a call, with sizes for any number of sequences of a microbatch.

Sizes proportional to the batch are separate from constant ones, so that one trace serves every microbatch size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple


class Size(NamedTuple):
    """``fixed`` and, for each sequence of a microbatch, ``per``: bytes, elements or operations."""

    fixed: float = 0.0
    per: float = 0.0

    @classmethod
    def of(cls, amount: float, micro: int, *, follows: bool) -> Size:
        """``amount`` of ``micro`` sequences."""
        return cls(0.0, amount / micro) if follows else cls(float(amount), 0.0)

    def at(self, micro: int) -> float:
        return self.fixed + self.per * micro

    def plus(self, other: Size) -> Size:
        return Size(self.fixed + other.fixed, self.per + other.per)

    def times(self, factor: float) -> Size:
        return Size(self.fixed * factor, self.per * factor)


NOTHING = Size()
Sides = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel. ``sides``: batch, m, n and k of a product, for one sequence; ``follows``: the index of the side that
    is proportional to the sequences of a microbatch (−1: none). ``attention``: operations of its products, for heads
    of ``head`` features.
    """

    dtype: str
    bytes: Size
    sides: tuple[int, int, int, int] | None = None
    follows: int = -1
    attention: Size = NOTHING
    head: int = 0

    def sides_at(self, micro: int) -> tuple[int, int, int, int]:
        assert self.sides is not None
        b, m, n, k = self.sides
        at = self.follows
        return (
            (b * micro, m, n, k)
            if at == 0
            else (b, m * micro, n, k)
            if at == 1
            else ((b, m, n * micro, k) if at == 2 else (b, m, n, k * micro) if at == 3 else (b, m, n, k))
        )

    def flops(self, micro: int) -> float:
        """Operations of its products."""
        return self.attention.at(micro) if self.sides is None else 2.0 * prod(self.sides_at(micro))

    def turned(self, order: tuple[int, int, int, int], more: Size) -> Op:
        """The product with its sides in another order, as the gradient of an operand is."""
        assert self.sides is not None
        b, m, n, k = (self.sides[i] for i in order)
        return Op(self.dtype, more, (b, m, n, k), order.index(self.follows) if self.follows >= 0 else -1)


OF_FIRST, OF_SECOND = (0, 1, 3, 2), (0, 3, 2, 1)  # [m, k] = g Bᵀ contracts n; [k, n] = Aᵀ g contracts m


@dataclass(frozen=True, slots=True)
class CallOps:
    """Kernels of one call. ``of_held``: those of the backward that make gradients of its second operand alone.

    ``of_weights``: of these, the ones that a W of a schedule may run: the second operand is a parameter, and the first
    has a gradient of its own. ``puts_aside``: bytes of the gradient that they wait with.
    """

    forward: tuple[Op, ...] = ()
    backward: tuple[Op, ...] = ()
    of_held: tuple[Op, ...] = ()
    of_weights: tuple[Op, ...] = ()
    puts_aside: Size = NOTHING


def together(parts: Iterable[CallOps]) -> CallOps:
    """Kernels of a call that does the work of several."""
    found = CallOps()
    for part in parts:
        found = CallOps(
            found.forward + part.forward,
            found.backward + part.backward,
            found.of_held + part.of_held,
            found.of_weights + part.of_weights,
            found.puts_aside.plus(part.puts_aside),
        )
    return found
