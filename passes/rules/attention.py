"""scaled_dot_product_attention(q[.., h, s, d], k[.., g, t, d], v[.., g, t, e], mask[.., s, t]) -> [.., h, s, e].

g = h                 heads by themselves
g < h (enable_gqa)    g by itself, and the h/g query heads of each; in q and the result g is the outer factor
is_causal             the result of a query depends on its position: s is mixed, its positions are kept
"""

from __future__ import annotations

from passes.rules.call import Call
from passes.rules.factors import EACH, MIX, Factors
from passes.rules.rule import RESULT, Factor, OpRule, Place


def attention(call: Call) -> OpRule | None:
    ndim, mask = len(call.result), 3 if len(call.shapes) > 3 else None
    if any(len(shape) != ndim for shape in call.shapes[:3]) or ndim < 3 or len(call.shapes) > 4:
        return None
    factors = Factors(call)
    for dim in range(ndim - 3):
        factors.add(EACH, (RESULT, dim), (0, dim), (1, dim), (2, dim), (mask, dim - ndim))
    _heads(factors, call, ndim - 3, mask)
    factors.add(MIX if call.given.get("is_causal") else EACH, (RESULT, -2), (0, -2), (mask, -2))
    factors.add(MIX, (1, -2), (2, -2), (mask, -1))
    factors.add(MIX, (0, -1), (1, -1))
    factors.add(EACH, (RESULT, -1), (2, -1))
    return factors.done()


def _heads(factors: Factors, call: Call, dim: int, mask: int | None) -> None:
    heads, groups = call.shapes[0][dim], call.shapes[1][dim]
    if heads == groups:
        factors.add(EACH, (RESULT, dim), (0, dim), (1, dim), (2, dim), (mask, -3))
        return
    each = heads // groups
    held = [(0, dim), (RESULT, dim)]
    if mask is not None and len(call.shapes[mask]) > 2 and call.shapes[mask][-3] == heads:
        held.append((mask, len(call.shapes[mask]) - 3))
    outer = [*(Place(o, d, each) for o, d in held), Place(1, dim), Place(2, dim)]
    factors.found += [Factor(EACH, groups, tuple(outer)), Factor(EACH, each, tuple(Place(o, d) for o, d in held))]
