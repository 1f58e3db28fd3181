"""Ops over images and signals [n, channels, ..]; ``n`` may be missing.

convolution     o of the weight each by itself, i summed over; with groups these are the outer factor of both
pooling         n and channels by themselves
group_norm      groups by themselves; batch_norm channels
"""

from typing import Any

from torch import fx

from passes.program.ops.aten import arguments
from passes.rules.rule import EACH, MIX, RESULT, SUM, Call, Factor, Factors, OpRule, Place, Role


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
