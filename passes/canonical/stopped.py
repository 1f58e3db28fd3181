"""If every reader of a value stops its gradient, the gradient stops before the op that makes the value.

    detach(f(x, y))                      → f(detach(x), detach(y))          straight-through estimators, scales of bits
    max(x, dim)[0], min of no gradient   → amax(x, dim), amin

So no gradient is planned, and nothing is kept, for calls that none flows through. ``meta["stopped"]`` says that their
values depend on some that have one.
"""

import operator

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from passes.program.builder import Builder
from passes.program.ops.aten import aten, named
from passes.program.ops.own_backward import OwnBackward


def stop_early(graph: fx.Graph) -> bool:
    """Move every detach up to the values that others read with a gradient; whether anything changed."""
    stopped = _stopped(graph)
    detached: dict[fx.Node, fx.Node] = {}
    for node in stopped:
        for value in node.all_input_nodes:
            if value.meta["grad"] and value not in stopped:
                if value not in detached:
                    build, val = Builder(graph, node, node), value.meta["val"].detach()
                    detached[value] = build.call(aten.detach.default, value, val=val, grad=False)
                    detached[value].meta["stopped"] = True
                node.replace_input_with(value, detached[value])
    for node in stopped:
        node.meta["grad"], node.meta["stopped"] = False, True
        node.meta["val"] = tree_map_only(torch.Tensor, torch.Tensor.detach, node.meta["val"])
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        if node.all_input_nodes[0] in stopped:
            node.replace_all_uses_with(node.all_input_nodes[0])
    for node in stopped:
        if node.target in (aten.max.dim, aten.min.dim):
            _pick(graph, node)
    return bool(stopped)


def _stopped(graph: fx.Graph) -> dict[fx.Node, None]:
    """Return calls with some readers that stop the gradient and none that passes it on, in the order of the graph."""
    found: dict[fx.Node, None] = {}

    def stops(user: fx.Node) -> bool:
        return user in found or user.target is aten.detach.default

    for node in reversed(graph.nodes):
        if node.op != "call_function" or not node.meta["grad"] or isinstance(node.target, OwnBackward):
            continue
        if any(map(stops, node.users)) and all(stops(u) or u.meta.get("grad") is False for u in node.users):
            found[node] = None
    return dict.fromkeys(n for n in reversed(found) if n.target is not operator.getitem or n.args[0] in found)


def _pick(graph: fx.Graph, node: fx.Node) -> None:
    """Replace max and min by amax and amin: the choice among equal elements matters to a gradient, and to readers of
    the index."""
    if any(user.target is not operator.getitem or user.args[1] for user in node.users):
        return
    given, extreme = named(node), aten.amax if node.target is aten.max.dim else aten.amin
    with graph.inserting_before(node):
        new = graph.call_function(extreme.default, (given["self"], [given["dim"]], given["keepdim"]))
    new.meta = node.meta | {"val": node.meta["val"][0]}
    for user in list(node.users):
        user.replace_all_uses_with(new)
