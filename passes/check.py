"""The facts of a stage's graph after each pass: each function has the name of the fact that it proves.

The runner (passes.lower.run_passes) calls them; the one that tries ops on meta takes half the time of a lowering, and
is called for a thorough lowering only. A violation is a bug of ours, never of the user's model.
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from passes.base import LowerContext, StageGraph, Violation
from passes.dropout import is_draw
from passes.gather_weights import aliases_of, buckets_of
from passes.moe import exchange
from passes.moe.domain import in_domain
from passes.ops import meeting
from passes.ops.axis import AxisHandle
from passes.ops.parameter_gate import await_bucket, need_again, need_weights
from passes.ops.recompute import MARKS
from passes.ops.region import run_region
from passes.partition.type_changes import sent_type
from passes.parts import calls_in
from passes.program.builder import bare
from passes.program.known_values import computed
from passes.program.ops.own_backward import OwnBackward
from passes.program.ops.sequence import CALLS
from passes.types.types import I, Placement


def is_sound(stage: StageGraph, context: LowerContext) -> Iterator[Violation]:
    """Every argument is a node of the graph that stands before its reader, and every attribute is there."""
    try:
        stage.graph.lint()
    except RuntimeError as error:
        yield Violation(None, "a sound graph", str(error))


def readers_get_the_type_that_they_want(stage: StageGraph, context: LowerContext) -> Iterator[Violation]:
    """The type of every value is known, and is the one in which each of its readers, or the next stage, takes it."""
    for reader, value, wanted in _reads(stage, context):
        found = value.meta.get("placement")
        if found != wanted:
            what = "no type" if found is None else f"type {found}"
            yield Violation(reader, f"{value.name} in type {wanted}", what)


def _reads(stage: StageGraph, context: LowerContext) -> Iterator[tuple[fx.Node, fx.Node, Placement]]:
    """(reader, value, wanted type) of all values that the stage reads or sends, and of its loss."""
    program, placements = context.lowering.program, context.lowering.placements
    for node in stage.graph.nodes:
        if change := node.meta.get("change"):
            yield node, node.all_input_nodes[0], change.before
    for name, node in stage.env.items():
        if node.op == "call_function":
            captured = program.node(name)
            for position, value in enumerate(node.all_input_nodes):
                yield node, value, placements.wanted(captured, position)
    output = stage.graph.output_node()
    names: Any = output.meta["names"]
    values: Any = output.args[0]
    for position, (name, value) in enumerate(zip(names, values, strict=True)):
        is_loss = stage.has_loss and position == len(names) - 1
        yield output, value, I if is_loss else sent_type(placements.of(program.node(name)))


_UNTRIED = (
    meeting.meet,
    meeting.ends_of,
    meeting.ids_of,
    meeting.part,
    exchange.join,
    *meeting.MOVING,
)  # the shapes of their results depend on the routing


def no_cp_placeholder_is_left(stage: StageGraph, context: LowerContext) -> Iterator[Violation]:
    """No call is left that only has the shape of an exchange along the sequence."""
    yield from (
        Violation(node, "an exchange over cp", "what stands for it")
        for node in stage.graph.nodes
        if node.target in CALLS
    )


def values_have_their_local_shape(stage: StageGraph, context: LowerContext) -> Iterator[Violation]:
    """Each op makes the local shape of its value's type from inputs of their types; equal calls are tried once."""
    trials = _Trials(stage, context)
    for node in stage.graph.nodes:
        if node.op == "call_function":
            made, due = trials.made(node), trials.due.get(node)
            if made is not None and due is not None and made != due:
                found = made if isinstance(made, str) else list(made)
                yield Violation(node, f"its local shape {list(due)}", f"{found}")


class _Trials:
    """Runs ops on meta. Owns: the expected shape of each value, and the result of each kind of call.

    ``made`` is a shape, or the error that the op raised; None if it cannot be determined: a tuple (its items are looked
    at), a Function of the user, an op that meta tensors do not have.
    """

    def __init__(self, stage: StageGraph, context: LowerContext) -> None:
        self.program, mesh = context.lowering.program, context.lowering.sizes
        axes = (context.tp, context.data, *context.axes.values())
        handles: dict[str, Any] = {axis.name: AxisHandle(axis.name, axis.size, axis.rank) for axis in axes}
        handles["sums"] = context.sums
        self.due: dict[fx.Node, tuple[int, ...]] = {}
        self.held: dict[fx.Node, Any] = {}  # the part of a call's key for a value
        self.tensors: dict[Any, Any] = {}
        self.results: dict[Any, Any] = {}
        for node in stage.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                local = node.meta["placement"].local_shape(tuple(value.shape), context.axis_of(node).size)
                self.due[node] = in_domain(node, local, mesh)
                self.held[node] = (self.due[node], value.dtype)
            elif node.op == "get_attr":
                self.held[node] = node.target
                self.tensors[node.target] = handles.get(str(node.target))

    def made(self, node: fx.Node) -> tuple[int, ...] | str | None:
        result = self._result(node)
        if not isinstance(node.meta.get("val"), Tensor):
            self.held[node] = id(result)
            self.tensors[id(result)] = result
        return tuple(result.shape) if isinstance(result, Tensor) else result if isinstance(result, str) else None

    def _result(self, node: fx.Node) -> Any:
        if isinstance(node.target, OwnBackward) or node.target in _UNTRIED:
            return None
        # one of several results that are not known
        if node.target is operator.getitem and self._tensor(self.held[node.all_input_nodes[0]]) is None:
            return None
        held = self.held
        key = (node.target, fx.map_arg((node.args, node.kwargs), lambda n: held[n]))
        try:
            if key not in self.results:
                self.results[key] = self._run(node)
        except TypeError:  # an argument that has no hash, as a slice
            return self._run(node)
        return self.results[key]

    def _run(self, node: fx.Node) -> Any:
        try:
            return computed(node, lambda n: self._tensor(self.held[n]), "meta")
        except NotImplementedError:
            return None
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}" if self._runs_whole(node) else None

    def _tensor(self, held: Any) -> Any:
        if held not in self.tensors:
            shape, dtype = held
            self.tensors[held] = torch.empty(shape, dtype=dtype, device="meta")
        return self.tensors[held]

    def _runs_whole(self, node: fx.Node) -> bool:
        """Whether the captured op runs on meta; an op that fails even at global shapes proves nothing."""
        try:
            computed(self.program.node(node.meta["origin"]), lambda n: bare(n.meta["val"]), "meta")
        except Exception:
            return False
        return True


def no_op_draws_from_the_default_generator(stage: StageGraph, context: LowerContext) -> Iterator[Violation]:
    """Layouts would disturb it: ranks call it in different order and number."""
    yield from (
        Violation(node, "a call that names its stream", "a draw") for node in stage.graph.nodes if is_draw(node)
    )


def no_op_names_another_device(stage: StageGraph, context: LowerContext) -> Iterator[Violation]:
    """Factories and casts make their results on the rank's device."""
    for node in stage.graph.nodes:
        for value in (*node.args, *node.kwargs.values()):
            if isinstance(value, torch.device) and value != context.device:
                yield Violation(node, f"device {context.device}", f"device {value}")


def parameters_are_awaited(stage: StageGraph, context: LowerContext) -> Iterator[Violation]:
    """Every read of a parameter that other ranks update comes after the wait for its bucket."""
    places, here = buckets_of(stage, context), set[tuple[int, int]]()
    if context.homes:
        return
    for node in stage.graph.nodes:
        if node.target is await_bucket:
            here.add(node.args[1:])
        for value in node.all_input_nodes:
            if value in places and places[value] not in here:
                yield Violation(node, f"a wait for bucket {places[value]} before {value.name} is read", "none")


def weights_are_whole(stage: StageGraph, context: LowerContext) -> Iterator[Violation]:
    """Every read of a weight that ranks hold in shards, or of a view of it, has its unit among those needed last."""
    if not context.homes:
        return
    places, here = aliases_of(stage, context), set[tuple[int, int]]()
    for node in stage.graph.nodes:
        if node.target is need_weights:
            here = set(node.args[1])
        if node.op != "call_function" or node.target in (need_again, *MARKS):
            continue
        for value in node.all_input_nodes:
            if not here.issuperset(places.get(value, ())):
                yield Violation(node, f"units {sorted(places[value])} to be needed before {value.name} is read", "none")


def regions_are_those_of_the_plan(stage: StageGraph, context: LowerContext) -> Iterator[Violation]:
    """Each captured region of the stage is one call; the values that cross its border are those that the plan lists, in
    its shapes.
    """
    planned = {r.index: r for r in context.regions if r.stage == stage.index and not r.refused}
    nodes = stage.graph.find_nodes(op="call_function", target=run_region)
    found = {getattr(stage.root, node.args[0].target): node for node in nodes}
    if sorted(call.index for call in found) != sorted(planned):
        yield Violation(None, f"the regions {sorted(planned)}", f"{sorted(call.index for call in found)}")
        return
    for call, node in found.items():
        region = planned[call.index]
        for what, listed, there in (("in", region.inputs, call.inputs), ("out", region.outputs, call.outputs)):
            names, crossing = sorted(v.name for v in listed.values()), sorted(v.name for v in there)
            if names != crossing:
                yield Violation(node, f"{', '.join(names)} to cross, {what}", ", ".join(crossing))


def pieces_are_those_of_the_plan(stage: StageGraph, context: LowerContext) -> Iterator[Violation]:
    """Each piece that the plan lists is one call, and has the ops that it lists."""
    planned = {piece.index: set(piece.nodes) for piece in context.pieces if piece.stage == stage.index}
    for call in calls_in(stage.graph, stage.root):
        found = {n.meta["origin"] for n in call.module.graph.nodes if n.op == "call_function"}
        listed = planned.pop(call.index, set())
        if listed != found:
            yield Violation(None, f"{call} of {', '.join(sorted(listed))}", ", ".join(sorted(found)))
    for index, names in planned.items():
        yield Violation(None, f"piece {index} of {', '.join(sorted(names))}", "no call")
