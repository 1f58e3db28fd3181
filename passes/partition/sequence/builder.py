"""New calls of the program of one rank: each has the place of the full program's value for which it is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.program.ops.aten import aten, shape_of
from passes.program.ops.sequence import gather_sequence, local_rows
from passes.types.types import Placement

COPIED = ("nn_module_stack", "stack_trace")


class Builder:
    """Owns the graph under construction; calls are made in any order, and ``sorted_graph`` puts them in place."""

    def __init__(self, source: fx.Graph, cp: int) -> None:
        self.cp, self.graph = cp, fx.Graph()
        self._places = {node: place for place, node in enumerate(source.nodes)}
        self._keys: dict[fx.Node, tuple[int, int]] = {}

    def copy(self, node: fx.Node, args: Any, kwargs: Any, val: Any = None) -> fx.Node:
        """A node of the full program over other operands; ``val``: its meta value, if that differs."""
        made = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        made.meta = dict(node.meta)
        if val is not None:
            made.meta["val"] = val
        return self._at(made, node)

    def call(
        self, like: fx.Node, target: Any, *args: Any, shape: tuple[int, ...], of: fx.Node | None = None
    ) -> fx.Node:
        """A new call at the place of ``like``; its value is that of ``of``, the first operand, with ``shape``."""
        made = self.graph.call_function(target, args)
        made.meta = {key: like.meta[key] for key in COPIED if key in like.meta}
        first = of or next(a for a in args if isinstance(a, fx.Node))
        made.meta["val"] = resized(first.meta["val"], shape)
        made.meta["grad"] = bool(first.meta.get("grad"))
        return self._at(made, like)

    def places(self, like: fx.Node, size: int) -> fx.Node:
        """0, 1, … of a full sequence."""
        made = self.graph.call_function(aten.arange.default, (size,), {"device": torch.device("cpu")})
        made.meta = {key: like.meta[key] for key in COPIED if key in like.meta}
        made.meta |= {"val": torch.empty(size, dtype=torch.int64, device="meta"), "grad": False}
        return self._at(made, like)

    def _at(self, made: fx.Node, like: fx.Node) -> fx.Node:
        own = (self._places[like], len(self._keys))
        self._keys[made] = max([own, *((self._keys[n][0], own[1]) for n in made.all_input_nodes)])
        return made

    # ---- exchanges along a dim cut as ``cut``, which may be several sequences behind each other

    def gather(self, like: fx.Node, x: fx.Node, cut: Placement) -> fx.Node:
        return self._over_segments(like, x, cut, gather_sequence, self.cp)

    def take(self, like: fx.Node, x: fx.Node, cut: Placement) -> fx.Node:
        return self._over_segments(like, x, cut, local_rows, 1 / self.cp)

    def _over_segments(self, like: fx.Node, x: fx.Node, cut: Placement, target: Any, factor: float) -> fx.Node:
        shape, dim = shape_of(x), cut.dim

        def scaled(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
            return tuple(round(n * factor) if d == dim else n for d, n in enumerate(shape))

        count = len(cut.segments)
        if count == 1:
            return self.call(like, target, x, dim, self.cp, shape=scaled(shape, dim))
        assert len(set(cut.segments)) == 1, "sequences of several lengths in one dim"
        apart = (*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])
        rows = self.call(like, aten.reshape.default, x, list(apart), shape=apart)
        moved = self.call(like, target, rows, dim + 1, self.cp, shape=scaled(apart, dim + 1))
        whole = scaled(shape, dim)
        return self.call(like, aten.reshape.default, moved, list(whole), shape=whole)

    # ---- the end

    def sorted_graph(self, result: fx.Node) -> fx.Graph:
        """Placeholders first, all else in the full program's order; unread nodes are removed."""
        self.graph.output((result,))
        self.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        nodes = [n for n in self.graph.nodes if n.op != "output"]
        for node in sorted(nodes, key=lambda n: self._keys[n]):
            env[node] = graph.node_copy(node, lambda n: env[n])
            env[node].meta = node.meta
        graph.output((env[result],))
        return graph


def resized(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A meta value of that dtype in another shape."""
    return torch.empty(shape, dtype=value.dtype, device="meta")
