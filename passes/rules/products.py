"""Products: written as text, einsum by its own equation. A bias would be added once for each part of a sum, so with a
bias the summed dim is mixed. Attention too, which has several of its own.

Ops over images and signals [n, channels, ..]; ``n`` may be missing.

convolution     o of the weight each by itself, i summed over; with groups these are the outer factor of both
group_norm      groups by themselves; batch_norm channels
"""

from collections.abc import Callable, Sequence
from string import ascii_letters
from typing import Any

from torch import fx

from passes.program.ops.aten import arguments
from passes.rules.notation import Pattern, parse
from passes.rules.rule import EACH, MIX, RESULT, SUM, Call, Factor, Factors, OpRule, Place, Role

Builder = Callable[[Call], OpRule | None]


def text(*patterns: str) -> Builder:
    """Return the first of the patterns that fits."""
    return text_of(*(parse(pattern) for pattern in patterns))


def text_of(*parsed: Pattern) -> Builder:
    def rule(call: Call) -> OpRule | None:
        return _first(parsed, call)

    return rule


def _first(patterns: Sequence[Pattern], call: Call) -> OpRule | None:
    return next((pattern.rule(call) for pattern in patterns if pattern.fits(call)), None)


def explicit(text: str, ndims: list[int]) -> str:
    """An einsum equation with every letter written out; ``ndims`` of the operands. Unchanged if it already is."""
    left, arrow, right = text.replace(" ", "").partition("->")
    words = left.split(",")
    if not arrow:
        letters = sorted({c for c in left if c.isalpha()})
        right = ("..." if "..." in left else "") + "".join(c for c in letters if left.count(c) == 1)
    free = [c for c in ascii_letters if c not in text]
    spare = [n - len(w.replace(".", "")) for w, n in zip(words, ndims, strict=True)]
    most = max((s for s, w in zip(spare, words, strict=True) if "..." in w), default=0)
    dots = "".join(free[:most])
    words = [w.replace("...", dots[most - s :]) for w, s in zip(words, spare, strict=True)]
    return ",".join(words) + "->" + right.replace("...", dots)


def einsum(call: Call) -> OpRule | None:
    words, _, result = explicit(str(call.given["equation"]), [len(shape) for shape in call.shapes]).partition("->")
    terms = [" ".join(c if c in result else f"{c}+" for c in word) for word in words.split(",")]
    try:
        pattern = parse(f"{', '.join(terms)} -> {' '.join(result)}")
    except ValueError:
        return None  # a diagonal
    return _first([pattern], call)


linear = text("... i+, o i+ -> ... o", "... i^, o i^, o -> ... o", "... i+, i+ -> ...")
matmul = text("... m k+, ... k+ n -> ... m n", "k+, k+ ->", "... m k+, k+ -> ... m", "k+, ... k+ n -> ... n")
addmm = text("m n, m k^, k^ n -> m n", "n, m k^, k^ n -> m n")
baddbmm = text("b m n, b m k^, b k^ n -> b m n", "m n, b m k^, b k^ n -> b m n", "n, b m k^, b k^ n -> b m n")
addmv = text("m, m k^, k^ -> m", ", m k^, k^ -> m")
addbmm = text("m n, b^ m k^, b^ k^ n -> m n", "n, b^ m k^, b^ k^ n -> m n")
grouped = text("t^ i+, e^ i+ o, e^ -> t^ o")  # which matrix multiplies a row follows from its position
embedding = text("v^ h, ... -> ... h")


def attention(call: Call) -> OpRule | None:
    """scaled_dot_product_attention(q[.., h, s, d], k[.., g, t, d], v[.., g, t, e], mask[.., s, t]) -> [.., h, s, e].

    g = h                 heads by themselves
    g < h (enable_gqa)    g by itself, and the h/g query heads of each; in q and the result g is the outer factor
    is_causal             the result of a query depends on its position: s is mixed, its positions are kept
    """
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


# ---- images and signals


def convolution(call: Call) -> OpRule:
    """conv1d, conv2d, conv3d; conv_transpose with a weight [i, o/groups, ..]."""
    given: dict[str, Any] = call.given
    transposed = is_transposed(call.node)
    groups, channel = int(given["groups"]), len(call.result) - len(call.shapes[1]) + 1
    factors = Factors(call)
    if channel:
        factors.add(EACH, (0, 0), (RESULT, 0))
    bias = 2 if len(call.shapes) > 2 else None
    out, into = factors.size(RESULT, channel) // groups, factors.size(0, channel) // groups
    o_dim, i_dim = (1, 0) if transposed else (0, 1)
    w_outer = Place(1, i_dim if transposed else o_dim, into if transposed else out)
    if groups > 1:
        places = [Place(0, channel, into), w_outer, Place(RESULT, channel, out)]
        factors.found.append(_factor(EACH, groups, *places, bias and Place(bias, 0, out)))
    factors.found.append(_factor(EACH, out, Place(1, o_dim), Place(RESULT, channel), bias and Place(bias, 0)))
    factors.found.append(_factor(MIX if bias else SUM, into, Place(0, channel), Place(1, i_dim)))
    factors.found = [f for f in factors.found if f.size > 1 or groups == 1]
    return factors.done()


def is_transposed(node: fx.Node) -> bool:
    return bool(arguments(node).get("transposed")) or "transpose" in str(node.target)


def _factor(role: Role, size: int, *places: Place | int | None) -> Factor:
    return Factor(role, size, tuple(p for p in places if isinstance(p, Place)))


def batch_norm(call: Call) -> OpRule:
    """Return the first result alone. With the statistics that it holds, each element by itself."""
    factors = _of_channels(call)
    role = MIX if call.given.get("training", True) and "no_training" not in str(call.node.target) else EACH
    for dim in (d for d in range(len(call.result)) if d != 1):
        factors.add(role, (0, dim), (RESULT, dim))
    return factors.done()


def instance_norm(call: Call) -> OpRule:
    """Running statistics are averages over n; with those that it holds, each element by itself."""
    factors, role = _of_channels(call), MIX if call.given["use_input_stats"] else EACH
    factors.add(role if call.position("running_mean") is not None else EACH, (0, 0), (RESULT, 0))
    for dim in range(2, len(call.result)):
        factors.add(role, (0, dim), (RESULT, dim))
    return factors.done()


def _of_channels(call: Call) -> Factors:
    factors = Factors(call)
    factors.add(EACH, (0, 1), (RESULT, 1), *((o, 0) for o in range(1, len(call.shapes))))
    return factors


def group_norm(call: Call) -> OpRule:
    factors, groups = Factors(call), int(call.given["num_groups"])
    size = call.result[1] // groups
    factors.add(EACH, (0, 0), (RESULT, 0))
    of_weights = range(1, len(call.shapes))
    for role, number, inner in ((EACH, groups, size), (MIX, size, 1)):
        places = [Place(0, 1, inner), Place(RESULT, 1, inner), *(Place(o, 0, inner) for o in of_weights)]
        factors.found.append(Factor(role, number, tuple(places)))
    for dim in range(2, len(call.result)):
        factors.add(MIX, (0, dim), (RESULT, dim))
    return factors.done()
