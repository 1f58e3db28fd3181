"""Operands that keep an op away from points without a value or a derivative.

A row that is not selected is computed too, and its result is discarded. If it were inf or NaN on the way, its gradient
would be 0 · inf. So an op that may be singular reads 1 there, unless its operand is known to be positive:

    y / z, log(z), rsqrt(z)   →   … where(selected, z, 1) …         but rsqrt(mean(x²) + eps) stays
"""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.program.ops.aten import aten, packet_of
from passes.program.ops.groups import DIVISIONS, LAID_OUT


def endangered(call: fx.Node) -> list[fx.Node]:
    """The operands of a singular op that at some values make its value or derivative non-finite."""
    packet = packet_of(call.target)
    if packet in DIVISIONS or packet is aten.reciprocal:
        divisor: Any = call.args[0] if packet is aten.reciprocal else call.args[1]
        return [divisor] if isinstance(divisor, fx.Node) and not _is_positive(divisor) else []
    if packet is aten.pow:
        return [] if _is_power(call) else [n for n in call.all_input_nodes if not _is_positive(n)]
    first: Any = call.args[0]
    overflows = packet in (aten.exp, aten.exp2, aten.expm1, aten.sinh, aten.cosh)
    return [] if not overflows and _is_positive(first) else [first]


def _is_power(call: fx.Node) -> bool:
    exponent = call.args[1]
    return isinstance(exponent, (int, float)) and exponent >= 1 and float(exponent).is_integer()


def _is_positive(node: Any) -> bool:
    """Whether a value is never zero or below: a sum of a non-negative value and a positive number."""
    node = _below(node, aten.sqrt, aten.rsqrt)
    if not isinstance(node, fx.Node):
        return isinstance(node, (int, float)) and node > 0
    if packet_of(node.target) is aten.add:
        a, b = node.args[:2]
        return any(isinstance(n, (int, float)) and n > 0 and _not_negative(o) for n, o in ((a, b), (b, a)))
    if packet_of(node.target) in (aten.clamp, aten.clamp_min, aten.clip):
        least = node.args[1] if len(node.args) > 1 else node.kwargs.get("min")
        return isinstance(least, (int, float)) and least > 0
    return False


def _below(node: Any, *packets: Any) -> Any:
    """The value from which one is made by these ops, casts and views alone."""
    while isinstance(node, fx.Node) and (node.target in LAID_OUT or packet_of(node.target) in packets):
        node = node.args[0]
    return node


def _not_negative(node: Any) -> bool:
    node = _below(node, aten.mean, aten.sum, aten.amax, aten.amin)
    if not isinstance(node, fx.Node):
        return isinstance(node, (int, float)) and node >= 0
    packet = packet_of(node.target)
    if packet is aten.pow:
        return node.args[1] in (2, 2.0, 4, 4.0)
    if packet is aten.mul:
        return node.args[0] is node.args[1]
    return packet in (aten.square, aten.abs, aten.relu, aten.sigmoid, aten.softmax, aten.var, aten.std, aten.sqrt)
