"""The facts of a stage's graph after each pass: each function has the name of the fact that it proves.

    is_sound                                   after every pass
    readers_get_the_type_that_they_want        so a partial sum reaches no reader that does not want one
    collectives_are_those_of_the_plan          by kind and phase, in both directions
    values_have_their_local_shape              each op, tried on meta at the shapes that this rank holds of its inputs
    no_op_draws_from_the_default_generator
    no_op_names_another_device
    regions_are_those_of_the_plan              each is one call, and its crossing values are listed in the plan
    pieces_are_those_of_the_plan               the ops to compile, one by one
    reruns_are_those_of_the_plan               their collectives
    parameters_are_awaited                     if other ranks update them

The runner (passes.lower.run_passes) calls them; the one that tries ops takes half the time of a lowering, and is called
for a thorough lowering only. A violation is a bug of ours, never of the user's model.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map_only

from passes.await_parameters import buckets_of
from passes.base import LowerContext, StageGraph, Violation
from passes.compile_pieces import calls_in
from passes.dropout import is_draw
from passes.moe.domain import in_domain
from passes.ops import collectives, meeting, slots
from passes.ops.axis import AxisHandle
from passes.ops.column_linear import column_linears, gathered_linears
from passes.ops.context import gather_sequence
from passes.ops.gathered_attention import gathered_attention
from passes.ops.norm import cut_layer_norm, cut_rms_norm
from passes.ops.own_tokens import of_gathered
from passes.ops.parameter_gate import await_bucket
from passes.ops.reductions import cut_amax, cut_amin, cut_vector_norm
from passes.ops.region import run_region
from passes.ops.scores import scores_of_targets
from passes.ops.softmax import cut_log_softmax, cut_logsumexp, cut_softmax
from passes.ops.vocabulary import vocabulary_cross_entropy
from passes.partition.type_changes import sent_type
from passes.program.ops.own_backward import OwnBackward
from passes.program.ops.sequence import CALLS
from passes.recompute import block_calls
from passes.types.conversions import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, TABLE
from passes.types.types import I, Placement

META = torch.device("meta")


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
    program, placements = context.staged.program, context.staged.placements
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


_CONVERSIONS = {collectives.BY_NAME[c.name]: c for c in TABLE.values()}
_OF_FORMS: dict[Callable[..., Any], tuple[int, int]] = {  # all-reduces of the forward and of the backward
    vocabulary_cross_entropy: (2, 0),
    scores_of_targets: (2, 0),
    cut_logsumexp: (2, 0),
    cut_softmax: (2, 1),
    cut_log_softmax: (2, 1),
    cut_layer_norm: (2, 2),
    cut_rms_norm: (1, 1),
    cut_vector_norm: (1, 0),
    cut_amax: (1, 0),
    cut_amin: (1, 0),
    column_linears: (0, 1),
}
_MOVES = (meeting.dispatch, meeting.give_back)
_MOVES_OF_SLOTS = {slots.send_slots: (ALL_GATHER, REDUCE_SCATTER), slots.return_slots: (REDUCE_SCATTER, ALL_GATHER)}
_UNTRIED = (
    meeting.meet,
    meeting.ends_of,
    meeting.ids_of,
    meeting.part,
    meeting.join,
    *_MOVES,
)  # the shapes of their results depend on the routing


def collectives_are_those_of_the_plan(stage: StageGraph, context: LowerContext) -> Iterator[Violation]:
    """The collectives of the graph for a microbatch over each axis are exactly those that the plan lists."""
    listed: Counter[tuple[str, str, str]] = Counter()
    axes = {context.tp.name: context.tp, context.data.name: context.data, **context.axes}
    for row in context.rows:
        if row.stage == stage.index and row.axis in axes and row.per == "microbatch" and not row.again:
            listed[row.axis, row.kind, row.phase] += row.count
    found = Counter(key for node in stage.graph.nodes for key in exchanges(node, axes))
    for axis, kind, phase in sorted(listed | found):
        planned, there = listed[axis, kind, phase], found[axis, kind, phase]
        if planned != there:
            yield Violation(None, f"{planned} {kind} of the {phase} over {axis}, as planned", f"{there}")


def exchanges(node: fx.Node, axes: Mapping[str, AxisHandle]) -> Iterator[tuple[str, str, str]]:
    """(axis, kind, phase) of each collective that a call runs."""
    target: Any = node.target
    if node.op != "call_function":
        return
    phases = ("forward", "backward") if node.meta.get("grad") else ("forward",)
    handles = (n for n in node.all_input_nodes if n.op in ("get_attr", "placeholder") and n.target in axes)
    axis = next((str(n.target) for n in handles), "tp")
    if target is scores_of_targets and node.args[4] is None:
        return  # of full logits
    if target in _CONVERSIONS:
        yield from ((axis, kind, p) for p in phases if (kind := getattr(_CONVERSIONS[target], p)))
        if (change := node.meta.get("change")) is not None and change.again:  # it becomes one op with its products
            yield (axis, ALL_GATHER, "backward")
    elif target is gathered_linears:
        kinds = [("forward", ALL_GATHER), *(("backward", kind) for kind in node.meta["change"].backward)]
        yield from ((axis, kind, phase) for phase, kind in kinds)
    elif target is gather_sequence:
        yield from (("cp", kind, p) for p, kind in zip(phases, (ALL_GATHER, REDUCE_SCATTER), strict=False))
        if node.meta.get("again"):  # it becomes one op with its product
            yield ("cp", ALL_GATHER, "backward")
    elif target is of_gathered:
        kinds = [("forward", ALL_GATHER), ("backward", ALL_GATHER), ("backward", REDUCE_SCATTER)]
        yield from (("cp", kind, p) for _ in node.args[2] for p, kind in kinds)  # pyright: ignore
    elif target is gathered_attention:  # keys and values in one
        kinds = [("forward", ALL_GATHER), ("backward", ALL_GATHER), ("backward", REDUCE_SCATTER)]
        yield from (("cp", kind, p) for p, kind in kinds if p in phases)
    elif target in _OF_FORMS:
        counts = zip(phases, _OF_FORMS[target], strict=False)
        yield from ((axis, ALL_REDUCE, p) for p, times in counts for _ in range(times))
    elif target is meeting.meet:
        yield from ((a, kind, "forward") for a, kind in (("ep", ALL_TO_ALL), ("etp", ALL_GATHER)) if axes[a].size > 1)
    elif target in _MOVES:
        yield from ((a, ALL_TO_ALL, p) for p in phases for a in ("ep", "etp") if axes[a].size > 1)
    elif target in _MOVES_OF_SLOTS:
        yield from (("ep", ALL_TO_ALL, p) for p in phases if axes["ep"].size > 1)
        kinds = _MOVES_OF_SLOTS[target]
        yield from (("etp", kind, p) for p, kind in zip(phases, kinds, strict=False) if axes["etp"].size > 1)


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
        self.program, mesh = context.staged.program, context.staged.sizes
        axes = {a.name: AxisHandle(a.name, a.size, a.rank) for a in (context.tp, context.data, *context.axes.values())}
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
                self.tensors[node.target] = axes.get(str(node.target))

    def made(self, node: fx.Node) -> tuple[int, ...] | str | None:
        result = self._result(node)
        if not isinstance(node.meta.get("val"), Tensor):
            self.held[node] = id(result)
            self.tensors[id(result)] = result
        return tuple(result.shape) if isinstance(result, Tensor) else result if isinstance(result, str) else None

    def _result(self, node: fx.Node) -> Any:
        if isinstance(node.target, OwnBackward) or node.target in _UNTRIED or self._is_item_of_untried(node):
            return None
        held = self.held
        key = (node.target, fx.map_arg((node.args, node.kwargs), lambda n: held[n]))
        try:
            if key not in self.results:
                self.results[key] = self._run(node)
        except TypeError:  # an argument that has no hash, as a slice
            return self._run(node)
        return self.results[key]

    def _is_item_of_untried(self, node: fx.Node) -> bool:
        """Whether it takes one of several results that are not known."""
        return node.target is operator.getitem and self._tensor(self.held[node.all_input_nodes[0]]) is None

    def _run(self, node: fx.Node) -> Any:
        try:
            return _called(node, lambda n: self._tensor(self.held[n]))
        except NotImplementedError:
            return None
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}" if self._runs_whole(node) else None

    def _tensor(self, held: Any) -> Any:
        if held not in self.tensors:
            shape, dtype = held
            self.tensors[held] = torch.empty(shape, dtype=dtype, device=META)
        return self.tensors[held]

    def _runs_whole(self, node: fx.Node) -> bool:
        """Whether the captured op runs on meta; an op that fails even at global shapes proves nothing."""
        try:
            _called(self.program.node(node.meta["origin"]), lambda n: tree_map_only(Tensor, _emptied, n.meta["val"]))
        except Exception:
            return False
        return True


def _emptied(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=META)


def _called(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    def on_meta(value: Any) -> Any:
        return value_of(value) if isinstance(value, fx.Node) else META if isinstance(value, torch.device) else value

    args, kwargs = map_aggregate((node.args, node.kwargs), on_meta)  # pyright: ignore[reportGeneralTypeIssues]
    target: Any = node.target
    with torch.no_grad():
        return target(*args, **kwargs)


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
    for node in stage.graph.nodes:
        if node.target is await_bucket:
            here.add(node.args[1:])
        for value in node.all_input_nodes:
            if value in places and places[value] not in here:
                yield Violation(node, f"a wait for bucket {places[value]} before {value.name} is read", "none")


def reruns_are_those_of_the_plan(stage: StageGraph, context: LowerContext) -> Iterator[Violation]:
    """The collectives of the stage's reruns are those that the plan lists as exchanged again."""
    axes = {context.tp.name: context.tp, "dp": context.data, **context.axes}
    mine = [row for row in context.rows if row.again and row.stage == stage.index]
    listed = Counter(key for row in mine for key in [(row.axis, row.kind)] * row.count)
    found = Counter(
        (axis, kind)
        for call in block_calls(stage)
        for node in call.module.graph.nodes
        for axis, kind, phase in exchanges(node, axes)
        if phase == "forward"
    )
    for key in sorted(listed | found):
        if listed[key] != found[key]:
            axis, kind = key
            yield Violation(None, f"{listed[key]} {kind} over {axis} again, as planned", f"{found[key]}")


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
