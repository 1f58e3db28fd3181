"""The captured program: the result of capture, which all later decisions read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from passes.errors import Where
from passes.program.assumptions import Assumption

# The keys of ``node.meta`` of a captured graph. Capture writes them; so do draws, experts and sharding over cp when
# they rewrite nodes. All other code reads them.
META = {
    "val": "a tensor of the node's shape and dtype without values, or a tuple of them",
    "inferred": "of an op without a rule: the pattern that trials show (capture.inferred_rules)",
    "grad": "whether a gradient of the loss may flow through it",
    "stopped": "whether its gradient stops at a detach that stands below it (capture.canonical.stopped)",
    "parameter": "of a placeholder: the user's dotted name of the parameter",
    "known": "of a placeholder: whether it is a buffer or a constant",
    "constant": "of a placeholder: its value, while the graph is brought into canonical form",
    "selected": "of a call: an index chose rows of it, while the graph is brought into canonical form",
    "asked": "of a mask: by which number a branch asked whether it selects anything, while the model is exported",
    "custom": "marks of autocast regions, while the model is exported",
    "nn_module_stack": "modules that computed it, as recorded by torch.export",
    "stack_trace": "source lines that computed it, as recorded by torch.export",
    "domain": "of a value among experts: which of its dims count experts or rows (experts.domain)",
    "draw": "of a call that draws: which element of which sample its numbers are for (types.draw)",
    "has_scores": "of a product: whether it is one of attention (placement.scores)",
}
# Further keys that lowering writes into the graphs of stages.
STAGE_META = {
    "origin": "the node's name in the captured graph",
    "product": "of a product lowered together with its bias: the name of the product alone in the captured graph",
    "placement": "its type over tp",
    "change": "of a collective: the change of type that it carries out",
    "names": "of the output: returned values, by name in the captured graph",
}


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
    rewrites: list[tuple[str, Where]] = field(default_factory=list)  # each simplification, and its line
    traced: list[Where] = field(default_factory=list)  # the user's questions about tracing that were answered with yes
    untrained: list[str] = field(default_factory=list)  # parameters that ask for a gradient and get none
    assumptions: list[Assumption] = field(default_factory=list)  # checks of values that must not raise
    skipped: frozenset[str] = frozenset()  # parameters that the forward does not read if data selects no rows

    def node(self, name: str) -> fx.Node:
        return self._index()[name]

    def graph_changed(self) -> None:
        """Call this after rewriting the graph: nodes that were looked up by name may be gone."""
        self.__dict__.pop("_nodes", None)

    def _index(self) -> dict[str, fx.Node]:
        index = self.__dict__.get("_nodes")
        if index is None or len(index) != len(self.graph.graph.nodes):
            index = self.__dict__["_nodes"] = {n.name: n for n in self.graph.graph.nodes}
        return index
