"""The rule of one call: its factors, and the places of each.

    linear(x[b, s, i], W[o, i])     b, s, o   each index is computed by itself
                                    i         summed over: it stands in both operands and not in the result
    softmax(x[b, s], -1)            b         each by itself          s      mixed
    x[h·d] seen as [h, d]           h, d      each by itself; in x they share a dim, h with an inner stride of d

Factors as in Shardy's sharding rules (openxla.org/shardy): every dim of an operand or of the result is the product of
the factors that stand there. A dim of size 1 that is broadcast has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

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
        """The factors of one dim, the innermost first."""
        found = [(p.inner, f) for f in self.factors if (p := f.at(operand)) is not None and p.dim == dim]
        return [f for _, f in sorted(found, key=lambda pair: pair[0])]

    def sole(self, operand: int, dim: int) -> Factor | None:
        """The factor that is all of a dim; None if it has several, or none."""
        found = self.along(operand, dim)
        return found[0] if len(found) == 1 else None

    def carried(self, source: int, dim: int, inner: int, size: int, target: int) -> tuple[int, int] | None:
        """(dim, inner) in another operand, or in the result, of the things that (position // inner) % size counts in
        ``dim`` of ``source``; None if they are missing, or not together."""
        step, end, found = 1, inner * size, []
        for factor in self.along(source, dim):
            first, last = max(inner, step), min(end, step * factor.size)
            if first < last:
                place = factor.at(target)
                if place is None or first % step or last % first or step * factor.size % last:
                    return None
                found.append((place.dim, place.inner * (first // step), last // first))
            step *= factor.size
        joined = all(b[:2] == (a[0], a[1] * a[2]) for a, b in pairwise(found))
        return found[0][:2] if found and joined and step % end == 0 else None
