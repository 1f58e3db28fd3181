"""Ops along dims that an argument names, reductions, norms: every other dim is by itself.

softmax, cumsum      the dim is mixed, and its positions are kept: one factor of operand and result
topk, sort, slice    positions are not kept: two factors
lstm, gru            the steps are mixed, and keep their positions
sum                  summed over          mean, amax, var …     mixed
"""

from collections.abc import Collection

from passes.rules.products import Builder
from passes.rules.rule import EACH, MIX, RESULT, SUM, Call, Factors, OpRule, Role, aligned

NAMES = ("dim", "dims", "axis")


def elementwise(call: Call) -> OpRule:
    """Align operands with broadcasting."""
    return aligned(call).done()


def like(call: Call) -> OpRule:
    """Align a result as large as the operand, and not made of its values."""
    return aligned(call).done(unread=range(len(call.shapes)))


def shaped_like(call: Call) -> OpRule:
    """Align the first operand; the second gives a shape or a dtype alone."""
    return aligned(call).done(unread=range(1, len(call.shapes)))


def new(call: Call) -> OpRule:
    """Align no operand: the size is given, and an operand gives its dtype alone."""
    return aligned(call, operands=()).done(unread=range(len(call.shapes)))


def kept(call: Call) -> OpRule:
    """Along a dim; its positions stay."""
    dims = _dims(call)
    return aligned(call, roles=dict.fromkeys(dims, MIX)).done()


def apart(call: Call) -> OpRule | None:
    """Along a dim of each operand; its positions change."""
    return _beside(call, _dims(call))


def of_sequence(call: Call) -> OpRule | None:
    """gather_sequence(x, dim, cp), local_rows: positions along the dim change."""
    return _beside(call, {int(call.node.args[1])})  # pyright: ignore[reportArgumentType]


def along_first(call: Call) -> OpRule | None:
    """split, slice …: dim 0 by default."""
    return _beside(call, call.dims(*NAMES) or frozenset({0}))


def last_two(call: Call) -> OpRule:
    ndim = len(call.result)
    return aligned(call, roles={ndim - 1: MIX, ndim - 2: MIX}).done()


def _dims(call: Call) -> frozenset[int]:
    """Return the last one if the op has no such argument, all of them if it is None."""
    found = call.dims(*NAMES)
    if found is not None:
        return found
    ndim = max(1, len(call.shapes[0]))
    return frozenset(range(ndim)) if any(n in call.given for n in NAMES) else frozenset({ndim - 1})


def _beside(call: Call, dims: Collection[int]) -> OpRule | None:
    ndim = len(call.result)
    if any(len(shape) != ndim for shape in call.shapes):
        return None
    factors = Factors(call)
    for dim in range(ndim):
        places = [(o, dim) for o in (RESULT, *range(len(call.shapes)))]
        if dim not in dims and len({factors.size(*place) for place in places}) == 1:
            factors.add(EACH, *places)
        else:
            for place in places:
                factors.add(MIX, place)
    return factors.done()


def reduction(role: Role) -> Builder:
    """Return the builder of a reduction, of all dims by default. ``max(x, other)`` is by elements."""

    def rule(call: Call) -> OpRule | None:
        if "other" in call.given:
            return elementwise(call)
        ndim = len(call.shapes[0])
        dims = call.dims(*NAMES)
        gone = frozenset(range(ndim)) if dims is None else dims
        factors = Factors(call)
        left = [d for d in range(ndim) if len(call.result) == ndim or d not in gone]
        for dim in range(ndim):
            if dim in gone:
                factors.add(role, (0, dim))
            else:
                factors.add(EACH, (0, dim), (RESULT, left.index(dim)))
        return factors.done()

    return rule


total, mixed = reduction(SUM), reduction(MIX)


def norm(call: Call) -> OpRule:
    """layer_norm, rms_norm: weights stand at the dims that are normed."""
    ndim, last = len(call.result), len(call.given["normalized_shape"])
    return aligned(call, roles={d: MIX for d in range(ndim - last, ndim)}).done()


def _without(call: Call, gone: Collection[int]) -> OpRule:
    """Put the dims of the operand but ``gone`` first in the result, in their order."""
    factors = Factors(call)
    for place, dim in enumerate(d for d in range(len(call.shapes[0])) if d not in gone):
        factors.add(EACH, (0, dim), (RESULT, place))
    return factors.done()


def selected(call: Call) -> OpRule:
    """select, unbind."""
    return _without(call, call.dims("dim") or {0})


def diagonal(call: Call) -> OpRule:
    """Put the elements of the diagonal last."""
    return _without(call, {call.given[name] % len(call.shapes[0]) for name in ("dim1", "dim2")})


def recurrent(call: Call) -> OpRule:
    """lstm, gru(x [t, b, i] or [b, t, i], states [layers, b, h], weights ..): each step reads those before it."""
    factors, states = Factors(call), call.given["hx"]
    steps = 1 if call.given["batch_first"] else 0
    factors.add(MIX, (0, steps), (RESULT, steps))
    of_states = range(1, 1 + (len(states) if isinstance(states, (list, tuple)) else 1))
    factors.add(EACH, (0, 1 - steps), (RESULT, 1 - steps), *((o, 1) for o in of_states))
    return factors.done()


def stack(call: Call) -> OpRule:
    new_dim = int(call.given["dim"]) % len(call.result)
    factors = Factors(call)
    for dim in range(len(call.shapes[0])):
        factors.add(EACH, (RESULT, dim + (dim >= new_dim)), *((o, dim) for o in range(len(call.shapes))))
    return factors.done()


def padded(call: Call) -> OpRule | None:
    """pad(x, [left, right, ..] from the last dim)."""
    ndim = len(call.result)
    return _beside(call, {ndim - 1 - i // 2 for i, amount in enumerate(call.given["pad"]) if amount})


def unfold(call: Call) -> OpRule:
    """unfold(x, dim, size, step) gives [.., windows, .., size]."""
    along = int(call.given["dimension"]) % max(1, len(call.shapes[0]))
    factors = Factors(call)
    for dim in range(len(call.shapes[0])):
        if dim != along:
            factors.add(EACH, (0, dim), (RESULT, dim))
    return factors.done()


ROLES = (EACH, MIX, SUM)  # by ``reduction``: none, mean, sum


def loss_of_rows(call: Call) -> OpRule:
    """cross_entropy_loss(x [n, c, ..], y [n, ..]), nll_loss_nd: unreduced each row is by itself, summed or mixed (mean)
    with others. Targets are class ids, or probabilities of the shape of x."""
    ndim, role = len(call.shapes[0]), ROLES[call.given["reduction"]]
    classes = 1 if ndim > 1 else 0
    factors, has_ids = Factors(call), len(call.shapes[1]) < ndim
    for dim in (d for d in range(ndim) if d != classes):
        row = dim - (dim > classes)
        factors.add(role, (0, dim), (1, row if has_ids else dim), *([(RESULT, row)] if role is EACH else []))
    if not has_ids:
        factors.add(MIX, (0, classes), (1, classes))
    return factors.done()
