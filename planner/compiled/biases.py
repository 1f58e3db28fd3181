"""Additions that become part of the product in front of them (passes.peephole.fuse_bias), and so belong to no piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from passes.program.ops.aten import aten
from passes.program.ops.groups import WITH_WEIGHT


def joined_biases(calls: Sequence[fx.Node], is_changed: Callable[[fx.Node, fx.Node], bool]) -> set[fx.Node]:
    """Of ``calls`` of one stage those that add a vector of the stage to a product, with no collective in between."""
    return {node for node in calls if _is_joined(node, is_changed)}


def _is_joined(node: fx.Node, is_changed: Callable[[fx.Node, fx.Node], bool]) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    product, bias = node.args
    if not (isinstance(product, fx.Node) and isinstance(bias, fx.Node)) or product.target not in WITH_WEIGHT:
        return False
    if len(product.users) != 1 or len(product.args) != 2 or is_changed(product, node) or is_changed(bias, node):
        return False
    if bias.op != "placeholder":
        return False
    value, whole = bias.meta["val"], product.meta["val"]
    return value.dim() == 1 and value.shape[0] == whole.shape[-1] and value.dtype == whole.dtype
