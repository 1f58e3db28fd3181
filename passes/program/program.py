"""The captured program: the result of capture, which all later decisions read; its assumptions, and its stages.

Checks of values that only raise are assumptions of a plan: the captured forward is the one that does not raise.

    if (ids > n).any(): raise …          assert x.max() < 1          F.gaussian_nll_loss: no variance below 0

If the check reads only the batch and is small, the host evaluates it for each microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from passes.errors import Where

# The keys of ``node.meta`` of a captured graph. Capture writes them; so do draws, experts and sharding over cp when
# they rewrite nodes. All other code reads them.
META = {
    "val": "a tensor of the node's shape and dtype without values, or a tuple of them",
    "inferred": "of an op without a rule: the pattern that trials show (planner.capture.inferred_rules)",
    "grad": "whether a gradient of the loss may flow through it",
    "stopped": "whether its gradient stops at a detach that stands below it (passes.canonical.form)",
    "parameter": "of a placeholder: the user's dotted name of the parameter",
    "known": "of a placeholder: whether it is a buffer or a constant",
    "constant": "of a placeholder: its value, while the graph is brought into canonical form",
    "selected": "of a call: an index chose rows of it; read until the loss is shared out",
    "cut_whole": "dims of which a cut was all; read until the loss is shared out",
    "unsqueezed": "of a reshape: its new dim, if that is known; read until the loss is shared out",
    "asked": "of a mask: by which number a branch asked whether it selects anything, while the model is exported",
    "custom": "marks of regions (autocast, no_grad), while the model is exported",
    "state": "of a call in the recording of a forward: the modes that it ran under",
    "nn_module_stack": "modules that computed it, as recorded by torch.export",
    "stack_trace": "source lines that computed it, as recorded by torch.export",
    "domain": "of a value among experts: which of its dims count experts or rows (passes.moe.domain)",
    "draw": "of a call that draws: which element of which sample its numbers are for (passes.types.types.Draw)",
    "has_scores": "of a product: whether it is one of attention (planner.placement.attention)",
}
# Further keys that lowering writes into the graphs of stages.
STAGE_META = {
    "origin": "the node's name in the captured graph",
    "product": "of a product lowered together with its bias: the name of the product alone in the captured graph",
    "placement": "its type over tp",
    "change": "of a collective: the change of type that it carries out",
    "names": "of the output: returned values, by name in the captured graph",
}
PACKED = "packed documents: "  # so begin rewrites by which ops end with documents


@dataclass(frozen=True, slots=True)
class Condition:
    """``question``, of numbers that ``graph`` computes of ``inputs`` (by batch key, and dtype), has one ``answer``."""

    graph: fx.GraphModule
    inputs: tuple[tuple[str, torch.dtype], ...]
    symbols: tuple[sympy.Symbol, ...]
    question: Any
    answer: bool

    def holds(self, microbatch: Mapping[str, torch.Tensor]) -> bool:
        """Return whether it holds of one microbatch, on the CPU."""
        with torch.no_grad():
            found = self.graph(*(microbatch[name].to(dtype) for name, dtype in self.inputs))
        values = {s: sympy.sympify(_number(value)) for s, value in zip(self.symbols, found, strict=True)}
        return bool(self.question.subs(values)) == self.answer

    def named(self, names: Sequence[str]) -> Condition | None:
        """Return it with the batch keys ``names``, which come last, for positions; None if it reads another value."""
        if any(int(position) < -len(names) for position, _ in self.inputs):
            return None
        return replace(self, inputs=tuple((names[int(position)], dtype) for position, dtype in self.inputs))


def _number(value: torch.Tensor) -> int | float:
    number = value.item()
    return int(number) if isinstance(number, bool) else number


@dataclass(frozen=True, slots=True)
class Assumption:
    """``condition``: by which a host checks each batch; None if it cannot."""

    where: Where
    what: str
    condition: Condition | None = None

    def __str__(self) -> str:
        checked = "checked on the host for each batch" if self.condition else "not checked during training"
        return f"assumed: {self.what}; {checked}"


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
    widens: bool = True  # whether a forward of more sequences made the same calls on wider tensors

    def node(self, name: str) -> fx.Node:
        found = self.__dict__.get("_nodes", {}).get(name)
        if found is None or found._erased or found.name != name or found.graph is not self.graph.graph:
            self.__dict__["_nodes"] = {n.name: n for n in self.graph.graph.nodes}
            found = self.__dict__["_nodes"][name]
        return found


def copied(program: Program) -> Program:
    """Return the full program again. Values in ``node.meta`` (tensors without memory) and constants are shared."""
    return program_of(program, copied_graph(program.graph.graph)[0])


def copied_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return the same calls under the same names; each node with its copy."""
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = made.node_copy(node, copies.__getitem__)
        if copies[node].name != node.name:  # setting it is dear
            copies[node].name = node.name
    return made, copies


def program_of(program: Program, graph: fx.Graph) -> Program:
    """Return ``program`` with ``graph``, which holds copies of all or some of its nodes under their names."""
    there = {node.name for node in graph.nodes}
    of_nodes = {name: getattr(program, name) for name in ("parameters", "buffers", "constants")}
    left = {name: {k: v for k, v in held.items() if k in there} for name, held in of_nodes.items()}
    others = ("aliases", "inputs", "outputs", "notes", "rewrites", "traced", "untrained", "assumptions")
    own = {name: copy(getattr(program, name)) for name in others}
    return replace(program, graph=Unwritten(program.graph, graph), **left, **own)


class Unwritten(fx.GraphModule):
    """A graph that is read and rewritten, and seldom run: op by op. fx writes and compiles the code of a GraphModule
    whenever its graph is set or rewritten; for a captured model that is a twentieth of its capture.
    """

    def recompile(self) -> Any:
        return None

    def forward(self, *args: Any) -> Any:
        return fx.Interpreter(self).run(*args)


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """The stage of each call; ``planner.fold`` decides which rank runs a stage.

    ``stage_of``           call that the loss needs → its stage; for a recomputed one the first that reads it
    ``recomputed``         calls that each stage of ``copies`` computes for itself
    ``copies``             recomputed call → all stages that read it
    ``live``               per cut k the values that stage k sends to stage k + 1, in graph order, passed through or not
    ``parameter_stages``   placeholder (parameter, buffer, constant, batch tensor) → stages that read it, maybe none
    ``blocks_of_stage``    indices of blocks
    ``cost_of_stage``      in the unit of the node cost, without recomputed calls
    """

    num_stages: int
    stage_of: dict[str, int]
    recomputed: frozenset[str]
    copies: dict[str, tuple[int, ...]]
    live: tuple[tuple[str, ...], ...]
    parameter_stages: dict[str, tuple[int, ...]]
    blocks_of_stage: tuple[tuple[int, ...], ...]
    cost_of_stage: tuple[int, ...]

    def runs_on(self, name: str, stage: int) -> bool:
        """Return whether ``stage`` computes the call ``name``."""
        return stage in self.copies[name] if name in self.recomputed else self.stage_of.get(name) == stage

    def tied(self) -> dict[str, tuple[int, ...]]:
        """Placeholders that several stages read."""
        return {name: stages for name, stages in self.parameter_stages.items() if len(stages) > 1}


@dataclass(frozen=True, slots=True)
class BoundaryPlan:
    """A value that one stage sends to the next: ``shape`` and ``bytes`` on one rank, ``placement`` over tp."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    placement: str = "I"
    requires_grad: bool = True
