"""The interface of a pass: one signature, over a stage under construction and this rank's part of the plan.

    run(stage, context)      rewrites ``stage.graph``
    leaves                   the facts that then hold: functions of passes/check.py, which the runner calls
    leaves_slowly            likewise, for a thorough lowering

The passes are one tuple (passes.lower.PASSES); a new one is one more entry there.

The result of lowering for the runtime is a stage's torch.fx GraphModule over local tensors. Its placeholders are, in
order, the received boundary values (``receives``), the batch tensors it reads (``inputs``), and the loss denominators
(``denominators``). It returns a tuple: the boundary values it sends (``sends``), the scores of labels if it was lowered
to give them, and last the loss if the stage computes it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from passes.lowering import Lowering
from passes.moe.domain import axis_of
from passes.ops.axis import AxisHandle
from passes.ops.counts import ExpertLoad, GlobalSums
from passes.ops.linear import column_linears, gathered_linears
from passes.ops.parameter_gate import ParameterGate
from passes.ops.random_state import RandomState
from passes.ops.weight_gradients import WeightGradients
from passes.parameters import LocalParameter
from passes.partition.sequence.versions import OneRow
from passes.pieces import CompiledPiece, Piece, Region
from passes.program.program import BoundaryPlan
from passes.program.source_lines import origin_of, where_of


@dataclass
class StageGraph:
    """A stage under construction. ``env``: captured name → node here."""

    index: int
    graph: fx.Graph
    root: nn.Module
    env: dict[str, fx.Node] = field(default_factory=dict)
    receives: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    denominators: tuple[str, ...] = ()
    parameters: dict[str, str] = field(default_factory=dict)  # captured placeholder → attribute
    buffers: dict[str, str] = field(default_factory=dict)
    has_loss: bool = False
    has_scores: bool = False

    def handle(self, name: str, handle: Any) -> fx.Node:
        """Return the node of a handle, which is an attribute of the stage's module; made once."""
        for node in self.graph.find_nodes(op="get_attr", target=name):
            return node
        setattr(self.root, name, handle)
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            return self.graph.create_node("get_attr", name)

    def axis(self, axis: AxisHandle) -> fx.Node:
        """Return the node that hands the axis to collectives."""
        return self.handle(axis.name, axis)

    def call(self, like: fx.Node, function: Any, args: tuple[Any, ...], value: Any, kwargs: Any = None) -> fx.Node:
        """Return a new call at the origin of ``like``; ``value``: a tensor as its result is."""
        new = self.graph.call_function(function, args, kwargs or {})
        held = {key: like.meta[key] for key in ("origin", "placement")}
        new.meta = origin_of(like) | held | {"val": value, "grad": False}
        return new


@dataclass(frozen=True)
class LowerContext:
    """The context that a pass may read beside the stage: what was decided, and this rank's handles.

    ``buckets``: parameter that other ranks update → its buffer on this rank, and the bucket in it. ``homes``: op → its
    block, or the place between blocks, if weights are sharded between their uses.
    """

    lowering: Lowering
    tp: AxisHandle
    random: RandomState
    device: torch.device
    gate: ParameterGate = field(default_factory=ParameterGate)
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    regions: tuple[Region, ...] = ()
    recomputed: tuple[Piece, ...] = ()
    pieces: tuple[CompiledPiece, ...] = ()
    buckets: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    homes: Mapping[str, Any] = field(default_factory=dict)
    thorough: bool = False  # whether facts that take long to prove are looked at too
    place: Mapping[str, int] = field(default_factory=dict)  # this rank's on each axis of the mesh
    data: AxisHandle = field(default_factory=lambda: AxisHandle("dp", 1, 0))
    load: ExpertLoad = field(default_factory=lambda: ExpertLoad(()))
    sums: GlobalSums | None = None  # of a loss that needs them, if a rank runs several microbatches
    axes: Mapping[str, AxisHandle] = field(default_factory=dict)  # of experts and of cp, if there are any
    one_row: OneRow | None = None  # if stages are lowered to compute one position of a sequence at a time

    def axis_of(self, node: fx.Node) -> AxisHandle:
        """Return the axis over which a value of the captured graph, or its replacement, is typed."""
        return self.axes.get(axis_of(node), self.tp)


@dataclass(frozen=True)
class Violation:
    """A fact that a pass must leave and did not: the node, the expected state and the actual one."""

    node: fx.Node | None
    expected: str
    found: str


class PassError(RuntimeError):
    """A pass did not leave a fact that it must: a bug of ours. Names the pass, the fact, the node and its origin."""

    def __init__(self, name: str, fact: str, stage: int, violation: Violation) -> None:
        node = violation.node
        self.name, self.fact, self.stage, self.violation = name, fact, stage, violation
        lines = [f"after the pass {name} this does not hold of stage {stage}: {fact.replace('_', ' ')}"]
        if node is not None:
            lines.append(f"  node:     {text_of(node)}")
            lines.append(f"  at:       {where_of(node)}")
        lines.append(f"  expected: {violation.expected}")
        lines.append(f"  found:    {violation.found}")
        lines.append("This is a bug in meshwright, not of your model or spec: please report it, with this message.")
        super().__init__("\n".join(lines))


Check = Callable[[StageGraph, LowerContext], Iterable[Violation]]


@dataclass(frozen=True)
class Pass:
    """One entry of the passes: the rewrite, and the facts that then hold."""

    run: Callable[[StageGraph, LowerContext], None]
    leaves: tuple[Check, ...] = ()
    leaves_slowly: tuple[Check, ...] = ()

    @property
    def name(self) -> str:
        return self.run.__name__


def ops_of(node: fx.Node) -> tuple[str, ...]:
    """Return the captured names of the ops that a node of a lowered graph computes, products before their biases: none
    of a change of type alone, several of one op that changes a type and multiplies."""
    sources = [node]
    if "change" in node.meta:
        sources = list(node.users) if node.target in (column_linears, gathered_linears) else []
    return tuple(name for n in sources for name in (n.meta.get("product"), n.meta["origin"]) if name is not None)


def kind_of(node: fx.Node) -> str:
    """The kind of a node: the function that it calls, ``self.…`` for a handle, else argument, attribute or output."""
    if node.op == "call_function":
        return name_of(node.target)
    if node.op == "get_attr":
        return f"self.{node.target}" if "val" not in node.meta else "attribute"
    return {"placeholder": "argument"}.get(node.op, node.op)


def name_of(function: Any) -> str:
    """``aten.add.Tensor``, ``aten.linear`` (the default overload), ``collectives.f``."""
    if isinstance(function, torch._ops.OpOverload):
        return str(function).removesuffix(".default")
    module = str(getattr(function, "__module__", "")).rpartition(".")[2]
    return f"{module}.{getattr(function, '__name__', function)}".lstrip("._")


def text_of(node: fx.Node, name: Callable[[fx.Node], str] = lambda node: node.name) -> str:
    """``linear = aten.linear(f, weight)``; ``name`` says how nodes are called."""

    def shown(value: Any) -> str:
        if isinstance(value, fx.Node):
            return name(value)
        if isinstance(value, (list, tuple)):
            inner = ", ".join(map(shown, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k}: {shown(v)}" for k, v in value.items()) + "}"
        return name_of(value) if callable(value) and not isinstance(value, torch.dtype) else str(value)

    if node.op == "output":
        return f"return {shown(node.args[0])}"
    if node.op != "call_function":
        return f"{name(node)} = {kind_of(node)}"
    given = [*map(shown, node.args), *(f"{key}={shown(value)}" for key, value in node.kwargs.items())]
    return f"{name(node)} = {name_of(node.target)}({', '.join(given)})"


@dataclass
class StageModule:
    """One stage (or virtual stage) of this rank, ready to run once its parameters and buffers are filled.

    ``module`` has every parameter as ``module.get_parameter(attributes[fqn])`` and every buffer likewise.
    """

    index: int
    chunk: int
    module: fx.GraphModule
    receives: tuple[BoundaryPlan, ...]
    sends: tuple[BoundaryPlan, ...]
    inputs: tuple[str, ...]
    denominators: tuple[int, ...]
    parameters: tuple[LocalParameter, ...]
    buffers: tuple[str, ...]
    attributes: dict[str, str]
    has_loss: bool
    has_scores: bool = False

    def parameter(self, fqn: str) -> nn.Parameter:
        return self.module.get_parameter(self.attributes[fqn])


@dataclass
class RankProgram:
    """All that one rank runs: its stages in chunk order, the axis handles and the random state they share.

    ``count_module(*inputs, *totals) -> tuple`` gives for ONE microbatch the loss denominators' local counts (scalars,
    such as its number of valid tokens); the engine sums them over the global batch and feeds the sums to
    ``denominators``. ``totals``: these sums, known after ``count_levels`` turns.
    ``load``: the counts of rows that experts get. ``sums``: those of the global batch that the loss needs, counted by
    forwards of their own. ``gate``: lets stages wait for updated parameters; None if all are
    awaited before the first forward. ``weight_gradients``: the weight gradients of their products.
    """

    stages: list[StageModule]
    axes: dict[str, AxisHandle]
    random: RandomState
    count_module: fx.GraphModule | None = None
    count_inputs: tuple[str, ...] = ()
    count_levels: int = 1
    gate: ParameterGate | None = None
    load: ExpertLoad | None = None
    sums: GlobalSums | None = None
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    notes: list[str] = field(default_factory=list)

    def totals(
        self,
        microbatches: Sequence[Mapping[str, torch.Tensor]],
        over_ranks: Callable[[torch.Tensor], None] = lambda _: None,
    ) -> list[torch.Tensor]:
        """The loss denominators of these microbatches together; ``over_ranks`` adds up those of all ranks in place."""
        if self.count_module is None:
            return []
        given = [[microbatch[name] for name in self.count_inputs] for microbatch in microbatches]
        number = len(self.count_module.graph.output_node().args[0])  # pyright: ignore[reportArgumentType]
        totals = torch.ones(number, dtype=torch.float64, device=given[0][0].device)
        for _ in range(self.count_levels):
            counts = [self.count_module(*inputs, *totals) for inputs in given]
            totals = torch.stack([torch.stack([c.to(torch.float64) for c in row]) for row in counts]).sum(0)
            over_ranks(totals)
        return list(totals)
