"""Parameters, and values that are views of them or of lookups in them."""

from __future__ import annotations

from operator import getitem

from torch import Tensor, fx

from passes.moe.picks import Pick, pick_of
from passes.moe.ties import lookup, ties
from passes.program.ops.aten import aten, named, packet_of, shape_of
from passes.program.ops.groups import LAID_OUT
from passes.program.weights import is_parameter, is_weight


def pick_of_weight(node: fx.Node) -> Pick | None:
    """One expert's matrix of a stack, or its values of a table; None for other values."""
    found = pick_of(node) if node.op == "call_function" else None
    return found if found is not None and is_parameter(found.whole) else None


def origin_of(node: fx.Node, dim: int) -> tuple[fx.Node, int] | None:
    """The parameter and its dim that a dim of a value so made is; None for others. A value computed of weights is a
    changed weight if it has all its dims.
    """
    while not is_parameter(node):
        if node.target is getitem and (pick := pick_of_weight(node)) is not None:
            return (pick.whole, dim) if pick.keeps and dim != pick.dim else None
        source = _source_of(node)
        up = [d for tie in ties(node) if (node, dim) in tie for n, d in tie if n is source]
        if source is None or len(up) != 1:
            return None
        node, dim = source, up[0]
    return node, dim


def _source_of(node: fx.Node) -> fx.Node | None:
    """The weight that ``node`` is a view or a change of, or a value that is one of a weight."""
    values = [n for n in node.all_input_nodes if isinstance(n.meta["val"], Tensor)]
    floats = [n for n in values if n.meta["val"].dtype.is_floating_point]
    if is_view(node):
        found = floats if len(floats) == 1 else []
    else:
        found = [n for n in floats if _has_all_dims(node, n)] if is_weight(node) else []
    return next((n for n in found if _is_of_weight(n) or _source_of(n) is not None), None)


def _is_of_weight(node: fx.Node) -> bool:
    return is_parameter(node) or pick_of_weight(node) is not None


def _has_all_dims(node: fx.Node, source: fx.Node) -> bool:
    held = [(dict(tie).get(node), dict(tie).get(source)) for tie in ties(node)]
    pairs = {(there, here) for there, here in held if there is not None and here is not None}
    return len(pairs) == len(shape_of(node)) == len(shape_of(source))


def is_view(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    packet = packet_of(node.target)
    is_one = packet is aten.select or (packet is aten.slice and shape_of(node)[int(named(node)["dim"])] == 1)
    return is_one or node.target in LAID_OUT or lookup(node) is not None
