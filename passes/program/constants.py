"""Values that no batch tensor, parameter or buffer enters, and that draw no random numbers: computed when planning.

arange, zeros and a fill, tril, comparisons of these …
ones_like(labels)      too, on request: it reads only the shape of ``labels``
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import fx

from passes.program.ops.aten import is_random
from passes.program.ops.groups import VALUED
from passes.program.program import Program
from passes.program.walks import in_order, operands, walk

MAX_ELEMENTS = 1 << 27
SHAPE_READERS = VALUED  # of their operand the shape, or the dtype, alone; the values of an empty one are arbitrary


def follows(node: fx.Node) -> bool:
    """Whether a call gives the same value each time that it is given the same operands."""
    return node.op == "call_function" and not is_random(node)


def is_made_of(node: fx.Node, known: Collection[fx.Node]) -> bool:
    """Whether a value is made of ``known`` ones (and of attributes of the graph) alone, without random numbers."""
    above = walk([node], operands, stop=lambda n: n in known)
    return all(n in known or n.op == "get_attr" or follows(n) for n in above)


def computed(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """The result of a call for its operands' values, on the CPU."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value_of)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    with torch.no_grad():
        return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]


class Constants:
    """Owns the values computed so far. ``nodes``: all constant nodes of ``program``."""

    def __init__(self, program: Program, *, of_shapes: bool = False, max_elements: int = MAX_ELEMENTS) -> None:
        self.program, self.max_elements = program, max_elements
        self.shape_readers = SHAPE_READERS if of_shapes else ()
        self.nodes: set[fx.Node] = set()
        for node in program.graph.graph.nodes:
            if self._is_constant(node):
                self.nodes.add(node)
        self._values: dict[fx.Node, Any] = {}

    def _is_constant(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            known = self.program.constants.get(node.name)
            return isinstance(known, torch.Tensor) and not known.is_meta
        if not follows(node):
            return False
        return node.target in self.shape_readers or all(n in self.nodes for n in node.all_input_nodes)

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """The value of a constant node on the CPU; None if it would be too large to look at."""
        for inner in in_order([node], step=self._operands):
            if inner in self._values:
                continue
            if inner.op == "placeholder":
                self._values[inner] = self.program.constants[inner.name]
                continue
            val = inner.meta["val"]
            if isinstance(val, torch.Tensor) and val.numel() > self.max_elements:
                return None
            self._values[inner] = computed(inner, self._given)
        return self._values[node]

    def _operands(self, node: fx.Node) -> Iterable[fx.Node]:
        return () if node.target in self.shape_readers else node.all_input_nodes

    def _given(self, node: fx.Node) -> Any:
        if node in self._values:
            return self._values[node]
        val = node.meta["val"]
        return torch.empty((), dtype=val.dtype).expand(val.shape)  # read for its shape alone
