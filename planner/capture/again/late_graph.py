"""The calls of a recording as a graph, made when a branch of the forward asks for the value of a tensor.

    if (positions == 0).all(): …        passes.program.known_values reads the calls that made the tensor, as of export

Takes the place of export's tracer: ``graph``, ``root`` and ``tensor_tracker`` are the parts of it that are read.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from planner.capture.again.operands import Operand, Recording, is_constant


class LateGraph:
    """Owns the graph of ``recording`` up to the last question. ``known``: the operand of a tensor, if it has one."""

    def __init__(self, recording: Recording, known: Callable[[Tensor], Operand | None]) -> None:
        self.graph, self.root = fx.Graph(), nn.Module()
        self.tensor_tracker = _Tracker(self._node_of, known)
        self._recording = recording
        self._nodes: dict[Operand, fx.Node] = {}
        self._made = 0

    def _node_of(self, operand: Operand) -> fx.Node:
        for number in range(self._made, len(self._recording.calls)):
            call = self._recording.calls[number]
            args, kwargs = pytree.tree_map_only(Operand, self._node, (call.args, call.kwargs))
            node = self._nodes[Operand(number)] = self.graph.call_function(call.target, args, kwargs)
            node.meta["val"] = self._recording.values[number]
        self._made = len(self._recording.calls)
        return self._node(operand)

    def _node(self, operand: Operand) -> fx.Node:
        if operand not in self._nodes:
            self._nodes[operand] = self._new(operand)
        return self._nodes[operand]

    def _new(self, operand: Operand) -> fx.Node:
        if operand.item is not None:
            raise ValueError("one of several results")
        name = str(operand.origin)
        if not is_constant(name):
            return self.graph.placeholder(name.replace(".", "_").replace(" ", "_"))
        setattr(self.root, name.replace(" ", "_"), self._recording.held[name])
        return self.graph.create_node("get_attr", name.replace(" ", "_"))


class _Tracker:
    """Of a tensor the node, where torch's ``get_proxy_slot`` looks for it."""

    def __init__(self, node_of: Callable[[Operand], fx.Node], known: Callable[[Tensor], Operand | None]) -> None:
        self._node_of, self._known = node_of, known

    def get(self, tensor: Tensor, default: Any = None) -> Any:
        operand = self._known(tensor)
        return default if operand is None else SimpleNamespace(proxy=SimpleNamespace(node=self._node_of(operand)))

    def __contains__(self, tensor: Tensor) -> bool:
        return self._known(tensor) is not None

    def __getitem__(self, tensor: Tensor) -> Any:
        return self.get(tensor)
