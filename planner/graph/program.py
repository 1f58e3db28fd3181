"""The captured program: what capture leaves, and all later decisions read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from planner.errors import Where


@dataclass
class Program:
    """A captured model. Names on the right are the user's own; placeholder names on the left are the graph's."""

    graph: fx.GraphModule
    parameters: dict[str, str]
    aliases: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, torch.Tensor]
    inputs: dict[str, str]
    outputs: dict[str, int]
    loss: str
    notes: list[str] = field(default_factory=list)
    rewrites: list[tuple[str, Where]] = field(default_factory=list)  # what was simplified, and where in the user's code

    def node(self, name: str) -> fx.Node:
        return self._index()[name]

    def _index(self) -> dict[str, fx.Node]:
        index = self.__dict__.get("_nodes")
        if index is None or len(index) != len(self.graph.graph.nodes):
            index = self.__dict__["_nodes"] = {n.name: n for n in self.graph.graph.nodes}
        return index
