"""New calls in a captured graph, and the end of calls that nothing reads.

A ``Builder`` makes calls with their place, their values and the source line of a call that they stand beside.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from passes.program.ops.aten import aten, has_floats, shape_of
from passes.program.source_lines import origin_of


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
        domain: object = None,
        **kwargs: Any,
    ) -> fx.Node:
        """``val``: left out, found by running the op on its arguments' meta values. ``grad``: left out, whether an
        argument has one. ``domain``: the mark of a value among experts (passes.moe.domain).
        """
        if val is None:
            given, options = fx.map_arg((args, kwargs), lambda n: bare(n.meta["val"]))
            val = bare(function(*given, **options))
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(function, args, kwargs)
        node.meta = origin_of(self.like) | {"val": val}
        found = has_floats(node) and any(n.meta.get("grad") for n in node.all_input_nodes)
        node.meta["grad"] = found if grad is None else grad
        if domain is not None:
            node.meta["domain"] = domain
        return node

    def repeated(self, x: fx.Node, dim: int, times: int) -> fx.Node:
        """Return each index of a dim ``times`` in a row."""
        before, (size, *rest) = shape_of(x)[:dim], shape_of(x)[dim:]
        apart = self.call(aten.reshape.default, x, [*before, size, 1, *rest])
        each = self.call(aten.expand.default, apart, [*before, size, times, *rest])
        return self.call(aten.reshape.default, each, [*before, size * times, *rest])


def arguments_with(node: fx.Node, own: Mapping[fx.Node, fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a call with other nodes in the place of some."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: own.get(n, n))
    return tuple(args), dict(kwargs)


def bare(value: Any) -> Any:
    """Tensors of the same shapes and dtypes on the meta device."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return tree_map_only(Tensor, bare, value)


def erase_unread(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase calls that have no readers left, from ``nodes`` up."""
    work, erased = list(nodes), set[fx.Node]()
    while work:
        node = work.pop()
        if node.op == "call_function" and not node.users and node not in erased:
            work += node.all_input_nodes
            erased.add(node)
            graph.erase_node(node)


def prune(graph: fx.Graph) -> None:
    """Erase all calls without readers; random ops are not kept for their side effect on the generator."""
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
