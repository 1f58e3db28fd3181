"""Ops that move elements, and those that read or write at positions that an index names. A reshape is read by common
factors:

[h·d] seen as [h, d]        h at x(0, inner d) and y(0), d at x(0) and y(1)
[2, 6] seen as [3, 4]       2 at x(1) and y(1); a 2·3 that is seen as 3·2 has no common factor: it is mixed

The dim that is indexed is mixed, every other by itself:

gather       y[.., k, ..] = x[.., i[.., k, ..], ..]          each k by itself: it reads all of x along the dim
index        x[.., i, j, ..]                                 the indices' common dims stand for the indexed ones
scatter, index_add, index_put                                the dim is mixed, and its positions are kept
"""

from collections.abc import Sequence
from math import gcd, prod
from typing import Any

import torch

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


def _dim(call: Call) -> int:
    return int(call.given["dim"]) % max(1, len(call.result))


def gather(call: Call) -> OpRule:
    x, index = call.position("self"), call.position("index")
    factors, along = Factors(call), _dim(call)
    for dim in range(len(call.result)):
        if dim == along:
            factors.add(EACH, (RESULT, dim), (index, dim))
            factors.add(MIX, (x, dim))
        elif x is not None and call.shapes[x][dim] == call.result[dim]:
            factors.add(EACH, (RESULT, dim), (index, dim), (x, dim))
    return factors.done()


def index_select(call: Call) -> OpRule:
    index, factors, along = call.position("index"), Factors(call), _dim(call)
    factors.add(MIX, (0, along))
    for dim in range(len(call.result)):
        factors.add(EACH, (RESULT, dim), (index, 0) if dim == along else (0, dim))
    return factors.done()


def index(call: Call) -> OpRule | None:
    """x[None, i, j, ..]; the size of a result by a mask of bools depends on data."""
    indices: Any = call.given["indices"]
    places = [d for d, i in enumerate(indices) if i is not None]
    used = range(1, len(call.operands))
    if not places or any(call.operands[o].meta["val"].dtype in (torch.bool, torch.uint8) for o in used):
        return None
    common = max(len(call.shapes[o]) for o in used)
    first = places[0] if places == list(range(places[0], places[0] + len(places))) else 0
    factors = Factors(call)
    for i in range(common):
        inside = [(o, i - common + len(call.shapes[o])) for o in used]
        factors.add(EACH, (RESULT, first + i), *((o, d) for o, d in inside if d >= 0))
    for dim in places:
        factors.add(MIX, (0, dim))
    free = [d for d in range(len(call.shapes[0])) if d not in places]
    for position, dim in enumerate(free):
        factors.add(EACH, (0, dim), (RESULT, position if position < first else position + common))
    return factors.done()


def scatter(call: Call) -> OpRule:
    """scatter, scatter_add, scatter_reduce: index and source may be smaller than their target."""
    return _placed(call, [call.position("index"), call.position("src")])


def index_add(call: Call) -> OpRule:
    """index_add, index_copy(x, dim, index, source)."""
    return _placed(call, [call.position("source")], (call.position("index"), 0))


def _placed(call: Call, others: Sequence[int | None], *index: tuple[int | None, int]) -> OpRule:
    """Return ``others`` are put along the dim, by the ``index``."""
    x, factors, along = call.position("self"), Factors(call), _dim(call)
    for dim in range(len(call.result)):
        if dim == along:
            factors.add(MIX, (RESULT, dim), (x, dim))
            factors.add(MIX, *index, *((o, dim) for o in others))
        elif all(o is None or call.shapes[o][dim] == call.result[dim] for o in others):
            factors.add(EACH, (RESULT, dim), (x, dim), *((o, dim) for o in others))
        else:
            factors.add(MIX, (RESULT, dim), (x, dim))
    return factors.done()


def index_put(call: Call) -> OpRule | None:
    """index_put(x, [i, j, ..], values): the dims behind the indexed ones are by themselves."""
    indices: Any = call.given["indices"]
    values = call.position("values")
    if None in indices or values is None or any(i.meta["val"].dtype == torch.bool for i in indices):
        return None
    factors, ndim = Factors(call), len(call.result)
    for dim in range(ndim):
        if dim < len(indices):
            factors.add(MIX, (RESULT, dim), (0, dim))
        else:
            factors.add(EACH, (RESULT, dim), (0, dim), (values, dim - ndim))
    return factors.done()
