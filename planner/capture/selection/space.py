"""The rows that one mask selects, facts about masks, and ops that act on each row alone.

torch.where(chosen == e)      mask [t, k], rows of t: at most one of a token's k choices is e, since they are of a topk
x[kept]                       mask [b, s], rows of b·s

Such an op computes a row independently of the others. ``rows``: the dim of the rows in operands with some; sizes may
be symbols, and the size of that dim is never read.

A row that is not selected is computed too, and its result is discarded. If it were inf or NaN on the way, its gradient
would be 0 · inf. So an op that may be singular reads 1 there, unless its operand is known to be positive:

    y / z, log(z), rsqrt(z)   →   … where(selected, z, 1) …         but rsqrt(mean(x²) + eps) stays

Its integers may be invalid indices, such as masked labels of -100: such an operand is 0 there.

    w[labels], gather(labels), one_hot(labels)   →   … where(selected, labels, 0) …
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from passes.program.ops.aten import aten, draws, has_gradient, is_pointwise, is_random, named, packet_of, shape_of
from passes.program.ops.groups import ANDS, DIVISIONS, LAID_OUT, MOVED, MOVES, PERMUTES, RESHAPES, Ops
from passes.program.walks import in_order
from passes.rules.rule import RESULT, Role, operands_of
from passes.rules.table import rule_of

TOTAL = Ops(
    "add sub rsub mul neg abs to _to_copy contiguous clone detach alias dropout masked_fill where relu gelu silu relu6 "
    "softplus sigmoid tanh hardtanh hardsigmoid hardswish leaky_relu elu selu celu mish log_sigmoid clamp clamp_min "
    "clamp_max clip minimum maximum max min eq ne lt le gt ge logical_and logical_or logical_not logical_xor "
    "bitwise_and bitwise_or bitwise_not __and__ __or__ square sin cos erf erfc atan sign sgn round floor ceil trunc "
    "zeros_like ones_like full_like empty_like type_as isnan isinf isfinite lerp addcmul threshold multiply subtract "
    "zero fill lift_fresh_copy"
)
# may give no number, or have no derivative, somewhere: a row that is not selected is kept away from there
SINGULAR = Ops(
    "div divide true_divide remainder fmod reciprocal log log2 log10 log1p sqrt rsqrt pow exp exp2 expm1 sinh cosh tan"
)


@dataclass(frozen=True, eq=False)
class Space:
    """``mask``: which positions are selected. ``kept``: its dims that index the rows; along the other dim, if there is
    one, at most one position is selected for a row. ``row_mask`` [num]: which rows are.
    """

    mask: fx.Node
    key: str
    kept: tuple[int, ...]
    row_mask: fx.Node

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.mask)

    @property
    def num(self) -> int:
        return prod(self.shape[d] for d in self.kept)

    @property
    def gone(self) -> tuple[int, ...]:
        return tuple(d for d in range(len(self.shape)) if d not in self.kept)


class Keys:
    """Keys of values: equal keys are equal values, in one graph and in graphs with the same placeholders."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, str] = {}

    def __call__(self, node: fx.Node) -> str:
        for each in in_order([node], self._known):
            self._known[each] = self._made(each)
        return self._known[node]

    def _made(self, node: fx.Node) -> str:
        if node.op != "call_function":
            return f"{node.op} {node.target}"
        return self._hashed(node, (node.args, dict(node.kwargs)))

    def _hashed(self, node: fx.Node, given: Any) -> str:
        given = fx.map_arg(given, self._named)
        # two draws are two values: the number of earlier draws distinguishes them
        drawn = sum(is_random(n) for n in self._known) if is_random(node) else ""
        return hashlib.sha256(f"{node.target} {given} {drawn}".encode()).hexdigest()

    def _named(self, node: fx.Node) -> Any:
        return _Key(self._known[node])


class _Key(str):
    """Stands for an operand in a call."""

    def __repr__(self) -> str:
        return f"<{self}>"


# ---- emptiness


def root_of(mask: fx.Node) -> fx.Node:
    """Return the mask from which ``mask`` is made by ops that leave it empty exactly if it was."""
    mask = _of_stack(mask)
    while mask.op == "call_function" and mask.args and isinstance(mask.args[0], fx.Node):
        packet = packet_of(mask.target)
        above_zero = _is_above_zero(mask) and is_count(mask.args[0])
        counts = packet in (aten.sum, aten.count_nonzero) and is_count(mask.args[0])
        casts = packet in (aten.to, aten._to_copy) and not is_count(mask.args[0])
        if casts or not (above_zero or counts or packet in LAID_OUT or packet is aten.any):
            break
        mask = mask.args[0]
    return mask


def key_of_mask(keys: Keys, root: fx.Node) -> str:
    """Return a key that is equal also for masks that compare one value, in two layouts, with one number."""
    if root.target is not aten.eq.Scalar:
        return keys(root)
    compared: Any = root.args[0]
    while compared.target in RESHAPES | PERMUTES and compared.args:
        compared = compared.args[0]
    return f"{root.target} {keys(compared)} {root.args[1]}"


def _of_stack(node: fx.Node) -> fx.Node:
    """Return the value that was stacked, for one value of a stack: a branch may ask about stacked counts one by one."""
    while packet_of(node.target) is aten.select or node.target is getitem:
        source = node.all_input_nodes[0]
        if node.target is getitem and packet_of(source.target) is aten.unbind and not named(source)["dim"]:
            index, stack = node.args[1], source.all_input_nodes[0]
        elif packet_of(node.target) is aten.select and not named(node)["dim"]:
            index, stack = named(node)["index"], source
        else:
            break
        if packet_of(stack.target) is not aten.stack or named(stack)["dim"]:
            break
        node = named(stack)["tensors"][index]
    return node


def is_count(node: Any) -> bool:
    """Return whether no element is negative or a fraction: of bools, one-hot numbers, and their sums."""
    node = _of_stack(node) if isinstance(node, fx.Node) else node
    while isinstance(node, fx.Node) and node.op == "call_function":
        dtype = node.meta["val"].dtype
        if str(dtype) == "torch.bool" or packet_of(node.target) is aten.one_hot:
            return True
        if node.target not in MOVED and packet_of(node.target) is not aten.sum:
            return False
        node = node.args[0]
    return isinstance(node, fx.Node) and str(node.meta["val"].dtype) == "torch.bool"


def _is_above_zero(node: fx.Node) -> bool:
    """Return whether the call is x ≠ 0, x > 0 or x ≥ 1: the same of counts."""
    return (node.target, *node.args[1:]) in ((aten.ne.Scalar, 0), (aten.gt.Scalar, 0), (aten.ge.Scalar, 1))


# ---- at most one


def at_most_one(node: fx.Node, depth: int = 0) -> frozenset[int]:
    """Return dims along which a mask selects at most one position, for each position along the others."""
    if node.op != "call_function" or depth > 64 or not node.all_input_nodes:
        return frozenset()
    x, packet = node.all_input_nodes[0], packet_of(node.target)
    if packet is aten.eq:
        return _single_of_equals(node)
    if node.target is getitem and packet_of(x.target) is aten.unbind:
        at = int(named(x)["dim"]) % len(shape_of(x.all_input_nodes[0]))
        return frozenset(d - (d > at) for d in at_most_one(x.all_input_nodes[0], depth + 1) if d != at)
    if packet is aten.one_hot:
        return _distinct(x, 0)
    if (packet in ANDS or packet is aten.mul) and len(node.all_input_nodes) == 2:
        same = [n for n in node.all_input_nodes if shape_of(n) == shape_of(node)]
        return frozenset().union(*(at_most_one(n, depth + 1) for n in same))
    if _is_above_zero(node):
        return at_most_one(x, depth + 1)
    return _moved(node, at_most_one(x, depth + 1)) if packet in MOVED else frozenset()


def _single_of_equals(eq: fx.Node) -> frozenset[int]:
    """Return dims of ids == e: along a dim of distinct ids, if all are compared with the same value."""
    ndim, found = len(shape_of(eq)), set[int]()
    for ids in eq.all_input_nodes:
        others = [n for n in eq.all_input_nodes if n is not ids]
        for dim in _distinct(ids, 0):
            from_last = len(shape_of(ids)) - dim
            if all(len(shape_of(n)) < from_last or shape_of(n)[-from_last] == 1 for n in others):
                found.add(ndim - from_last)
    return frozenset(found)


def _distinct(ids: fx.Node, depth: int) -> frozenset[int]:
    """Return dims along which no number occurs twice, for each position along the others."""
    if ids.op != "call_function" or depth > 64 or not ids.all_input_nodes:
        return frozenset()
    x = ids.all_input_nodes[0]
    if ids.target is getitem:
        ranks = packet_of(x.target) in (aten.topk, aten.sort) and ids.args[1] == 1
        return (
            frozenset({int(named(x).get("dim", -1)) % len(shape_of(ids))}) if ranks and shape_of(ids) else frozenset()
        )
    if packet_of(ids.target) is aten.argsort:
        return frozenset({int(named(ids).get("dim", -1)) % len(shape_of(ids))})
    return _moved(ids, _distinct(x, depth + 1)) if ids.target in MOVED else frozenset()


def _moved(call: fx.Node, dims: frozenset[int]) -> frozenset[int]:
    """Return the dims of a view's base in the view; dims that are merged or split are lost."""
    rule = rule_of(call)
    if rule is None:
        return frozenset()
    if packet_of(call.target) is aten.slice:
        return dims
    found = [(f, f.at(RESULT)) for d in dims if (f := rule.sole(0, d)) is not None]
    return frozenset(place.dim for f, place in found if place is not None and rule.sole(RESULT, place.dim) is f)


def acts_on_each_row(call: fx.Node, rows: Mapping[fx.Node, int], out: int | None) -> bool:
    """Return whether the rows are one factor of their own wherever they stand, and nothing else is.

    ``out``: the dim of the rows in the result; None if it is no tensor or has none.
    """
    rule = rule_of(call) if is_known(call) else None
    if rule is None:
        return False
    places = {(i, rows[n]) for i, n in enumerate(operands_of(call)) if n in rows and i not in rule.unread}
    places |= {(RESULT, out)} if out is not None else set()
    found = {rule.sole(*place) for place in places}
    factor = found.pop() if len(found) == 1 else None
    if factor is None or factor.role is not Role.EACH:
        return False
    return {(p.operand, p.dim) for p in factor.places if p.operand not in rule.unread} == places


def is_known(call: fx.Node) -> bool:
    """Return whether value and derivative are finite, or it is known where not, and the op draws nothing itself."""
    packet = packet_of(call.target)
    known = not is_pointwise(call.target) or packet in TOTAL or packet in SINGULAR
    return known and (not draws(call.target) or packet is aten.dropout)


def endangered(call: fx.Node) -> list[fx.Node]:
    """Return the operands of a singular op for which some values make its value or derivative non-finite."""
    packet = packet_of(call.target)
    if packet in DIVISIONS or packet in (aten.remainder, aten.fmod, aten.reciprocal):
        divisor: Any = call.args[0] if packet is aten.reciprocal else call.args[1]
        return [divisor] if isinstance(divisor, fx.Node) and not _is_positive(divisor) else []
    if packet is aten.pow:
        exponent = call.args[1]
        is_whole = isinstance(exponent, (int, float)) and exponent >= 1 and float(exponent).is_integer()
        return [] if is_whole else [n for n in call.all_input_nodes if not _is_positive(n)]
    first: Any = call.args[0]
    overflows = packet in (aten.exp, aten.exp2, aten.expm1, aten.sinh, aten.cosh)
    return [] if not overflows and _is_positive(first) else [first]


def naming_places(call: fx.Node) -> list[fx.Node]:
    """Return integer operands that a call neither moves nor computes with one by one: ids, classes, indices."""
    if is_pointwise(call.target) or call.target in MOVES:
        return []
    return [n for n in call.all_input_nodes if is_integer(n.meta["val"])]


def is_integer(value: Any) -> bool:
    """Return whether it is a tensor of integers, not of bools."""
    dtype = value.dtype if isinstance(value, torch.Tensor) else torch.bool
    return not (dtype == torch.bool or has_gradient(dtype))


def _is_positive(node: Any) -> bool:
    """Return whether a value is always above zero: a sum of a non-negative value and a positive number."""
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
    """Return the value from which one is made by these ops, casts and views alone."""
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
