"""New calls of a captured graph that is opened at experts: their place, their values, and their source line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from passes.moe.domain import Domain

COPIED = ("nn_module_stack", "stack_trace")


class Builder:
    """Adds calls before ``place``, as of the line of ``like``."""

    def __init__(self, graph: fx.Graph, place: fx.Node, like: fx.Node) -> None:
        self.graph, self.place, self.like = graph, place, like

    def call(
        self,
        function: Any,
        *args: Any,
        val: Any = None,
        grad: bool | None = None,
        domain: Domain | None = None,
        **kwargs: Any,
    ) -> fx.Node:
        """``val``: left out, found by running the op on its arguments' meta values. ``grad``: left out, whether an
        argument has one."""
        if val is None:
            given, options = fx.map_arg((args, kwargs), lambda n: bare(n.meta["val"]))
            val = function(*given, **options)
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(function, args, kwargs)
        node.meta = {key: self.like.meta[key] for key in COPIED if key in self.like.meta}
        floats = isinstance(val, tuple | list) or val.dtype.is_floating_point
        found = floats and any(n.meta.get("grad") for n in node.all_input_nodes)
        node.meta |= {"val": val, "grad": found if grad is None else grad}
        if domain is not None:
            node.meta["domain"] = domain
        return node


def bare(value: Any) -> Any:
    """Tensors of the same shapes and dtypes on the meta device."""
    return tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), value)


def erase_unread(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase calls that have no readers left, from ``nodes`` up."""
    work, erased = list(nodes), set[fx.Node]()
    while work:
        node = work.pop()
        if node.op == "call_function" and not node.users and node not in erased:
            work += node.all_input_nodes
            erased.add(node)
            graph.erase_node(node)
