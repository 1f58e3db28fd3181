"""Collects the factors of a rule, dim by dim."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from passes.rules.call import Call
from passes.rules.rule import RESULT, Factor, OpRule, Place, Role

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
        """A dim without a factor is mixed by itself, unless it is broadcast."""
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
