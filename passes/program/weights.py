"""Weights: parameters, and all that is computed of parameters and of known values alone.

    W     W.float()     cat([W, V])     g * W / norm(W)     W + b @ a          not: a buffer alone, x @ W

Known values are buffers and constants of floats: a table that is read at known places is no changed weight.
"""

from math import inf
from weakref import WeakKeyDictionary

from torch import fx

from passes.program.ops.aten import is_random, tensors_of
from passes.program.walks import in_order, operands, walk

_NO_WEIGHT, _KNOWN = -1, inf
# By node's name, as a rewrite leaves the meaning of a value, and a graph gives no name twice: the least number of dims
# of the parameters that a value is computed of.
_least: WeakKeyDictionary[fx.Graph, dict[str, float]] = WeakKeyDictionary()


def is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and bool(node.meta.get("parameter"))


def is_weight(node: fx.Node, least_dims: int = 0) -> bool:
    """Return whether the value is a parameter, or computed of parameters, buffers and constants alone.

    ``least_dims``: of each of the parameters.
    """
    found = _least.setdefault(node.graph, {})
    if node.name not in found:
        for n in in_order([node], step=lambda n: () if n.name in found else n.all_input_nodes):
            if n.name not in found:
                found[n.name] = _least_dims(n, found)
    return least_dims <= found[node.name] < inf


def is_computed_weight(node: fx.Node, least_dims: int = 0) -> bool:
    """Return whether a call gives a weight: a changed one, or several together."""
    return node.op == "call_function" and is_weight(node, least_dims)


def matrices_read(call: fx.Node) -> list[fx.Node]:
    """Return the parameters that weights of several dims are, or are computed of, which a call reads."""
    read = [n for n in call.all_input_nodes if is_weight(n) and n.meta["val"].dim() > 1]
    return sorted(n for n in walk(read, operands) if is_parameter(n))


def _least_dims(node: fx.Node, found: dict[str, float]) -> float:
    if is_parameter(node):
        return node.meta["val"].dim()
    if node.op == "call_function" and node.all_input_nodes:
        return min(found[n.name] for n in node.all_input_nodes)
    # a buffer or a constant of floats, or a call that fills a tensor with some
    is_known = bool(node.meta.get("known")) or (node.op == "call_function" and not is_random(node))
    return _KNOWN if is_known and all(x.dtype.is_floating_point for x in tensors_of(node)) else _NO_WEIGHT
