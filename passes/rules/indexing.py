"""Ops that read or write at positions that an index names: the dim that is indexed is mixed, every other by itself.

gather       y[.., k, ..] = x[.., i[.., k, ..], ..]          each k by itself: it reads all of x along the dim
index        x[.., i, j, ..]                                 the indices' common dims stand for the indexed ones
scatter, index_add, index_put                                the dim is mixed, and its positions are kept
"""

from collections.abc import Sequence
from typing import Any

import torch

from passes.rules.rule import EACH, MIX, RESULT, Call, Factors, OpRule


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
