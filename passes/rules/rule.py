"""The rule of one call: its factors, and the places of each.

    linear(x[b, s, i], W[o, i])     b, s, o   each index is computed by itself
                                    i         summed over: it stands in both operands and not in the result
    softmax(x[b, s], -1)            b         each by itself          s      mixed
    x[h·d] seen as [h, d]           h, d      each by itself; in x they share a dim, h with an inner stride of d

Factors as in Shardy's sharding rules (openxla.org/shardy): every dim of an operand or of the result is the product of
the factors that stand there. A dim of size 1 that is broadcast has none.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from passes.rules.call import Call

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
