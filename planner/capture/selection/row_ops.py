"""Ops that act on each row alone: what they make of a row does not depend on which others are there.

``rows`` is where the rows stand in each operand that has some; sizes may be symbols, a row's dim is never looked at.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from passes.program.ops.aten import aten, draws, is_pointwise, packet_of
from passes.program.ops.groups import Ops
from passes.rules.call import operands_of
from passes.rules.rule import RESULT, Role
from passes.rules.table import rule_of

Rows = Mapping[fx.Node, int]


def acts_on_each_row(call: fx.Node, rows: Rows, out: int | None) -> bool:
    """Whether the rows are one factor of their own wherever they stand, and nothing else is.

    ``out``: where the rows stand in what the call makes; None where it is no tensor or has none.
    """
    rule = rule_of(call) if _is_finite(call) else None
    if rule is None:
        return False
    places = {(i, rows[n]) for i, n in enumerate(operands_of(call)) if n in rows and i not in rule.unread}
    places |= {(RESULT, out)} if out is not None else set()
    found = {rule.sole(*place) for place in places}
    factor = found.pop() if len(found) == 1 else None
    if factor is None or factor.role is not Role.EACH:
        return False
    return {(p.operand, p.dim) for p in factor.places if p.operand not in rule.unread} == places


def _is_finite(call: fx.Node) -> bool:
    """Whether the op has a number and a derivative everywhere, or it is known where not, and draws none of its own."""
    packet = packet_of(call.target)
    known = not is_pointwise(call.target) or packet in TOTAL or packet in SINGULAR
    return known and (not draws(call.target) or packet is aten.dropout)


TOTAL = Ops(
    "add sub rsub mul neg abs to _to_copy contiguous clone detach alias dropout masked_fill where relu gelu silu relu6 "
    "softplus sigmoid tanh hardtanh hardsigmoid hardswish leaky_relu elu selu celu mish log_sigmoid clamp clamp_min "
    "clamp_max clip minimum maximum max min eq ne lt le gt ge logical_and logical_or logical_not logical_xor "
    "bitwise_and bitwise_or bitwise_not __and__ __or__ square sin cos erf erfc atan sign sgn round floor ceil trunc "
    "zeros_like ones_like full_like empty_like type_as isnan isinf isfinite lerp addcmul threshold multiply subtract "
    "zero fill lift_fresh_copy"
)
# may give no number, or have no derivative, somewhere: a row that is not selected is kept away from there
SINGULAR = Ops("div divide true_divide reciprocal log log2 log10 log1p sqrt rsqrt pow exp exp2 expm1 sinh cosh tan")
