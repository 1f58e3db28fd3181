"""The role of each parameter, from the ops that read it: how fresh weights are drawn depends on it.

scale      of a norm, or a vector that multiplies         residual   a matrix with a product added to activations
bias       any other vector                               ""         any other matrix
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import getitem

from torch import fx

from passes.program.ops.aten import aten, packet_of
from passes.program.ops.groups import LAID_OUT, PERMUTES, WITH_WEIGHT


def parameter_roles(graph: fx.Graph, parameters: Mapping[str, str]) -> dict[str, str]:
    """The role of each parameter of a captured graph, by fqn: "scale", "bias", "residual", or "" for other weights."""
    return {parameters[n.name]: _role(n) for n in graph.nodes if n.op == "placeholder" and n.name in parameters}


def _role(node: fx.Node) -> str:
    uses = [(user, position) for user in node.users for position, arg in enumerate(user.args) if arg is node]
    names = [(getattr(user.target, "_opname", str(user.target)), position) for user, position in uses]
    if any("norm" in name for name, _ in names):
        # the weight stands before the bias in every norm's arguments
        first = min(p for name, p in names if "norm" in name)
        user = next(user for user, p in uses if p == first)
        earlier = [
            a for a in user.args[:first] if isinstance(a, fx.Node) and a.op == "placeholder" and a.meta["val"].ndim == 1
        ]
        return "bias" if earlier else "scale"
    if node.meta["val"].ndim <= 1:
        return "scale" if any(name.startswith("mul") for name, _ in names) else "bias"
    return "residual" if any(_writes_residual(user) for user, _ in uses) else ""


def _writes_residual(node: fx.Node) -> bool:
    """Whether the output of this linear reaches, through views, dropout and its bias, a sum of two activations."""
    if node.target in PERMUTES:
        return any(_writes_residual(user) for user in node.users)
    if node.target not in WITH_WEIGHT and node.target is not aten.matmul.default:
        return False
    while len(node.users) == 1:
        (node,) = node.users
        packet = packet_of(node.target)
        if packet is aten.add and all(isinstance(a, fx.Node) and a.op != "placeholder" for a in node.args[:2]):
            return True
        if packet not in LAID_OUT and packet not in (aten.add, aten.dropout, aten.native_dropout, getitem):
            return False
    return False
