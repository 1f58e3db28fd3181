"""Ops that move elements alone. A reshape is read by common factors:

[h·d] seen as [h, d]        h at x(0, inner d) and y(0), d at x(0) and y(1)
[2, 6] seen as [3, 4]       2 at x(1) and y(1); a 2·3 that is seen as 3·2 has no common factor: it is mixed
"""

from math import gcd, prod

from passes.program.ops.aten import permutation
from passes.rules.rule import EACH, MIX, RESULT, Call, Factor, Factors, OpRule, Place, Shape


def reshape(call: Call) -> OpRule | None:
    """view, flatten, squeeze … too: the sizes say it all, but for a view as another dtype."""
    x, y = call.shapes[0], call.result
    if prod(x) != prod(y):
        return None
    unread = frozenset(range(1, len(call.shapes)))
    left, right = ([d for d, n in enumerate(shape) if n != 1] for shape in (x, y))
    found = [*_ones(x, y), *_common(_Side(0, x, left), _Side(RESULT, y, right))]
    return OpRule(tuple(found), unread)


class _Side:
    """What is left to factor of one tensor: dims from first to last, of each the part that is left."""

    def __init__(self, operand: int, shape: Shape, dims: list[int]) -> None:
        self.operand = operand
        self.dims = [[d, shape[d], 1] for d in dims]  # dim, the rest of it, its inner stride

    def outer(self, size: int) -> Place:
        """Take ``size`` off the outer end."""
        first = self.dims[0]
        first[1] //= size
        place = Place(self.operand, first[0], first[2] * first[1])
        self.dims = self.dims[first[1] == 1 :]
        return place

    def inner(self, size: int) -> Place:
        last = self.dims[-1]
        place = Place(self.operand, last[0], last[2])
        last[1] //= size
        last[2] *= size
        self.dims = self.dims[: len(self.dims) - (last[1] == 1)]
        return place

    def rest(self) -> list[Factor]:
        return [Factor(MIX, n, (Place(self.operand, d, inner),)) for d, n, inner in self.dims]


def _common(x: _Side, y: _Side) -> list[Factor]:
    found: list[Factor] = []
    while x.dims and y.dims:
        if (size := gcd(x.dims[0][1], y.dims[0][1])) > 1:
            found.append(Factor(EACH, size, (x.outer(size), y.outer(size))))
        elif (size := gcd(x.dims[-1][1], y.dims[-1][1])) > 1:
            found.append(Factor(EACH, size, (x.inner(size), y.inner(size))))
        else:
            break
    return [*found, *x.rest(), *y.rest()]


def _ones(x: Shape, y: Shape) -> list[Factor]:
    """Dims of size 1 that stand before the same elements; of several the first."""
    found: list[Factor] = []
    for dim in (d for d, n in enumerate(x) if n == 1):
        same = [d for d, n in enumerate(y) if n == 1 and prod(y[d:]) == prod(x[dim:])]
        if same:
            found.append(Factor(EACH, 1, (Place(0, dim), Place(RESULT, same[0]))))
    return found


def permute(call: Call) -> OpRule:
    """permute, transpose, t, movedim …: the op itself gives the new place of each dim."""
    factors, node = Factors(call), call.node
    for dim, source in enumerate(permutation(node.target, len(call.result), node.args[1:], node.kwargs)):
        factors.add(EACH, (0, source), (RESULT, dim))
    return factors.done()


def repeat(call: Call) -> OpRule:
    """Make the repeats of a dim its outer factor."""
    shift = len(call.result) - len(call.shapes[0])
    found: list[Factor] = []
    for dim, size in enumerate(call.result):
        own = call.shapes[0][dim - shift] if dim >= shift else 1
        if own > 1 or size == 1:
            here = (Place(0, dim - shift),) if dim >= shift else ()
            found.append(Factor(EACH, own, (*here, Place(RESULT, dim))))
        if size > own:
            found.append(Factor(EACH, size // own, (Place(RESULT, dim, own),)))
    return OpRule(tuple(found))
