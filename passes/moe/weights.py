"""Parameters, and values that are views of them or of lookups in them."""

from __future__ import annotations

from torch import fx

from passes.moe.ties import lookup, ties
from passes.program.ops.aten import aten, packet_of
from passes.program.ops.groups import LAID_OUT


def is_weight(node: fx.Node) -> bool:
    return node.op == "placeholder" and bool(node.meta.get("parameter"))


def origin_of(node: fx.Node, dim: int) -> tuple[fx.Node, int] | None:
    """The parameter and its dim that a dim of a value so made is; None for others."""
    while not is_weight(node):
        sources = [n for n in node.all_input_nodes if n.meta["val"].dtype.is_floating_point] if is_view(node) else []
        if len(sources) != 1:
            return None
        up = [d for tie in ties(node) if (node, dim) in tie for n, d in tie if n is sources[0]]
        if len(up) != 1:
            return None
        node, dim = sources[0], up[0]
    return node, dim


def is_view(node: fx.Node) -> bool:
    packet = packet_of(node.target)
    return node.op == "call_function" and (packet in LAID_OUT or packet is aten.select or lookup(node) is not None)
