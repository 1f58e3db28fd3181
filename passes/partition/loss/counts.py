"""Counts of the global batch: placeholders for them, and the graph that counts one microbatch.

A count is a sum over batch tensors alone, such as ``mask.sum()``: known before the first forward, and over the global
batch simply the sum of the microbatches' counts. The mean of a batch tensor is such a sum over their number. A small
vector of sums, one of each column, is as many counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes.program.program import Program
from passes.program.walks import ancestors

aten = torch.ops.aten

MOST_SUMS = 64  # elements of a count that is no scalar


@dataclass
class LossTerms:
    """``denominators``: placeholders of the counts, in order. ``counts``: the graph that counts one microbatch, of the
    batch tensors ``count_inputs``. ``inexact``: ops that could not be made exact, and their places. ``mixed``: ops
    before the loss that mix the sequences of a batch; ``unknown``: those that may. ``doubts``: ops of the loss with a
    number or a constant that may depend on the batch size, left unchanged. ``counted_first``: ops that read sums over
    the global batch while a rank runs ``in_turn`` microbatches: all forwards of a step run once more, to count them.
    ``adds_up``: the loss is a sum over sequences, over counts at most: of any number of microbatches it adds up."""

    denominators: list[str] = field(default_factory=list)
    counts: fx.GraphModule | None = None
    count_inputs: tuple[str, ...] = ()
    inexact: list[tuple[str, Any]] = field(default_factory=list)
    mixed: list[tuple[str, Any]] = field(default_factory=list)
    unknown: list[tuple[str, Any]] = field(default_factory=list)
    doubts: list[tuple[str, Any]] = field(default_factory=list)
    counted_first: list[tuple[str, Any]] = field(default_factory=list)
    in_turn: int = 1
    adds_up: bool = False


class Counts:
    """Owns the counts found so far, in ``program``'s graph."""

    def __init__(self, program: Program, terms: LossTerms) -> None:
        self.terms = terms
        self.graph = program.graph.graph
        self.counted: list[fx.Node] = []

    def holder(self, count: fx.Node) -> fx.Node:
        """The placeholder (float64) that will hold Σ ``count`` over the global batch."""
        if count not in self.counted:
            self.counted.append(count)
            last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
            with self.graph.inserting_after(last):
                holder = self.graph.placeholder(f"denominator_{len(self.counted) - 1}")
            holder.meta = {"val": torch.empty((), dtype=torch.float64, device="meta"), "grad": False}
            self.terms.denominators.append(holder.name)
        name = self.terms.denominators[self.counted.index(count)]
        return next(n for n in self.graph.nodes if n.name == name)

    def globalise(self, node: fx.Node, count: fx.Node) -> fx.Node:
        """Give every reader of ``node``, a microbatch's value, that of the global batch: the sum of ``count``."""
        readers, value = list(node.users), node.meta["val"]
        scalars = [count] if not value.dim() else self._elements(count)
        holders = [self.holder(scalar) for scalar in scalars]
        with self.graph.inserting_before(node.next):
            cast = self.graph.call_function(aten.to.dtype, (self._joined(holders, value), value.dtype))
        cast.meta = {**node.meta, "val": torch.empty(value.shape, dtype=value.dtype, device="meta"), "grad": False}
        made = ancestors(scalars) - {node}
        for reader in readers:
            if reader not in made:
                reader.replace_input_with(node, cast)
        return cast

    def _elements(self, count: fx.Node) -> list[fx.Node]:
        """Each element of a count that is no scalar."""
        value = count.meta["val"]
        with self.graph.inserting_before(self.graph.output_node()):
            flat = self._call(aten.reshape.default, (count, [value.numel()]), value.reshape(-1))
            parts = [(flat, i) for i in range(value.numel())]
            cut = [self._call(aten.slice.Tensor, (x, 0, i, i + 1), x.meta["val"][i : i + 1]) for x, i in parts]
            return [self._call(aten.reshape.default, (x, []), x.meta["val"].reshape([])) for x in cut]

    def _joined(self, holders: list[fx.Node], value: torch.Tensor) -> fx.Node:
        """The holders of all elements in the shape of ``value``, in float64."""
        if not value.dim():
            return holders[0]
        rows = [self._call(aten.reshape.default, (h, [1]), h.meta["val"].reshape(1)) for h in holders]
        flat = self._call(aten.cat.default, (rows,), torch.cat([row.meta["val"] for row in rows]))
        return self._call(aten.reshape.default, (flat, list(value.shape)), flat.meta["val"].reshape(value.shape))

    def _call(self, target: Any, args: tuple[Any, ...], value: torch.Tensor) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = {"val": value, "grad": False}
        return node

    def finish(self) -> None:
        """Split off the graph of the counts: it reads batch tensors (and constants) alone."""
        if not self.counted:
            return
        needed = ancestors(self.counted)
        graph, env = fx.Graph(), {}
        for node in self.graph.nodes:
            if node in needed:
                env[node] = graph.node_copy(node, lambda n: env[n])
        graph.output(tuple(env[n] for n in self.counted))
        self.terms.counts = fx.GraphModule(torch.nn.Module(), graph)
        self.terms.count_inputs = tuple(n.name for n in self.graph.nodes if n in needed and n.op == "placeholder")


def input_only(program: Program) -> dict[str, bool]:
    """Nodes that depend on batch tensors, buffers and constants alone → whether on a batch tensor."""
    found: dict[str, bool] = {}
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            if node.name not in program.parameters:
                found[node.name] = node.name in program.inputs
        elif node.op == "call_function" and all(n.name in found for n in node.all_input_nodes):
            found[node.name] = any(found[n.name] for n in node.all_input_nodes)
    return found
