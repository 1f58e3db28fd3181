"""Values that no batch tensor, parameter or buffer enters, and that draw no random numbers: computed when planning.

arange, zeros and a fill, tril, comparisons of these …
ones_like(labels)      too, where asked for: of ``labels`` it reads the shape alone
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from planner.graph.program import Program

aten = torch.ops.aten
MAX_ELEMENTS = 1 << 27
SHAPE_READERS = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}


class Constants:
    """Owns the values computed so far. ``nodes``: all constant nodes of ``program``."""

    def __init__(self, program: Program, *, of_shapes: bool = False, max_elements: int = MAX_ELEMENTS) -> None:
        self.program, self.max_elements = program, max_elements
        self.shape_readers = SHAPE_READERS if of_shapes else set()
        self.nodes: set[fx.Node] = set()
        for node in program.graph.graph.nodes:
            if self._is_constant(node):
                self.nodes.add(node)
        self._values: dict[fx.Node, Any] = {}

    def _is_constant(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            known = self.program.constants.get(node.name)
            return known is not None and not known.is_meta
        if node.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return False
        return node.target in self.shape_readers or all(n in self.nodes for n in node.all_input_nodes)

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """The value of a constant node on the CPU; None where it would be too large to look at."""
        for inner in self._in_order(node):
            if inner in self._values:
                continue
            if inner.op == "placeholder":
                self._values[inner] = self.program.constants[inner.name]
                continue
            val = inner.meta["val"]
            if isinstance(val, torch.Tensor) and val.numel() > self.max_elements:
                return None
            self._values[inner] = self._computed(inner)
        return self._values[node]

    def _computed(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._given)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    def _given(self, node: fx.Node) -> Any:
        if node in self._values:
            return self._values[node]
        val = node.meta["val"]
        return torch.empty(1, dtype=val.dtype).expand(val.shape)  # read for its shape alone

    def _in_order(self, node: fx.Node) -> list[fx.Node]:
        """What ``node`` is made of, and last itself."""
        seen: set[fx.Node] = set()
        order: list[fx.Node] = []
        stack = [(node, False)]
        while stack:
            current, done = stack.pop()
            if done:
                order.append(current)
            elif current not in seen:
                seen.add(current)
                stack.append((current, True))
                if current.target not in self.shape_readers:
                    stack.extend((n, False) for n in current.all_input_nodes)
        return order
