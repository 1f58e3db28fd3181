"""Capture a model at another length or batch size without an export: the first graph with other numbers.

    first export      view(x, [2, 1024, 12, 64])      call 17 of its recording, with the same numbers
    recording         view(x, [2, 512, 12, 64])       call 17 of a forward at another length
    the other graph   view(x, [2, 512, 12, 64])       and the shape that the recording saw

A graph is made only if nothing but numbers differs:

    each call of the first graph is a call of the first recording, argument by argument, and so are its results
    each call of the other recording is that of the first, under the same modes, with the same operands and flags
    constants have the same values, and the forward's result the same structure

Otherwise the model branches on its length, or export records more than the calls, and the model is exported again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import eq, getitem
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from passes.program.ops.aten import nodes_in
from passes.program.program import Unwritten, copied_graph
from planner.capture.data_dependence import calls_in
from planner.capture.graphs_equal import fingerprint
from planner.capture.model.exchange import has_values
from planner.capture.recording import Recording


class Unlike(Exception):
    """Two graphs or recordings differ in more than numbers."""


@dataclass
class Earlier:
    """State that captures of one model, for one loss and dtype, share. ``first``: the first export, if it can be
    resized; its calls are recorded when a second size is asked for, which is rare.

    ``traced``: the questions about tracing that must be answered truly (planner.capture.python.eager_answers).
    ``was_repeated``: whether a forward at another length was called twice, as the first was, and computed the same.
    That shows state which no attribute shows; more lengths are called once.
    """

    first: KeptExport | FirstExport | None = None
    traced: dict[Any, Any] = field(default_factory=dict)
    was_repeated: bool = False


@dataclass(frozen=True)
class KeptExport:
    """An export of ``inputs``, of which copies are rewritten; its forward is not recorded yet."""

    exported: ExportedProgram
    inputs: Mapping[str, torch.Tensor]


class FirstExport:
    """Owns a flat copy of an export, and the call of ``recording`` for each node.

    Raises Unlike if the recording is not that of the export.
    """

    def __init__(self, exported: ExportedProgram, recording: Recording) -> None:
        self._exported, self._first = copied_export(exported)[0], recording
        self._constants: dict[str, str] = {}  # of the export → name in the recording
        self._twins: dict[fx.Node, Any] = {}  # node → that of the recording
        self._calls = iter([node for node in recording.graph.nodes if isinstance(node.target, torch._ops.OpOverload)])
        graph, signature = self._exported.graph, exported.graph_signature
        held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        _drop_checks(graph)
        for holder in graph.find_nodes(op="placeholder"):
            if holder.name in signature.user_inputs:
                self._twins[holder] = recording.inputs[str(holder.target)]
            elif holder.name in held:
                self._twins[holder] = recording.parameters[held[holder.name]]
        for node in calls_in(self._exported.graph_module):
            self._twins[node] = self._twin(node)
        results = [self._twins[n] for n in nodes_in(graph.output_node().args)]
        if results != [n for n in recording.results if isinstance(n, fx.Node)]:
            raise Unlike("the results")
        recording.forget_values()

    def _twin(self, node: fx.Node) -> Any:
        if node.target is getitem:
            source, item = self._twins[node.args[0]], node.args[1]  # pyright: ignore
            return next(n for n in source.users if n.target is getitem and n.args[1] == item)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise Unlike(str(node.target))
        for call in self._calls:
            given = (node.args, node.kwargs), (call.args, call.kwargs)
            if call.target is node.target and _alike(*given, self._is_same):
                return call
        raise Unlike(str(node))

    def _is_same(self, ours: fx.Node, recorded: Any) -> bool:
        return self._twins[ours] is recorded if ours in self._twins else self._is_constant(ours, recorded)

    def _is_constant(self, holder: fx.Node, recorded: Any) -> bool:
        """Return whether ``recorded`` is a constant's node: the first call that reads a constant shows it."""
        target = self._exported.graph_signature.inputs_to_lifted_tensor_constants[holder.name]
        held = self._first.constants.get(str(recorded.target)) if isinstance(recorded, fx.Node) else None
        if not _is_equal(self._exported.constants.get(target), held):
            return False
        self._twins[holder], self._constants[target] = recorded, str(recorded.target)
        return True

    def is_again(self, recording: Recording) -> bool:
        """Return whether ``recording`` has the same calls, with the same numbers."""
        with suppress(Unlike):
            return bool(self._beside(recording, eq))
        return False

    def _beside(self, recording: Recording, numbers: Callable[[Any, Any], bool]) -> dict[fx.Node, fx.Node]:
        """Return each call with that of ``recording``. Raises Unlike if they, or their ``numbers``, differ."""
        first = self._first
        theirs = dict(zip(first.graph.nodes, recording.graph.nodes, strict=False))
        if len(first.graph.nodes) != len(recording.graph.nodes):
            raise Unlike("another number of calls")
        for a, b in theirs.items():
            is_one_op = a.target == b.target and a.meta.get("state") == b.meta.get("state")
            given = (a.args, a.kwargs), (b.args, b.kwargs)
            if not is_one_op or not _alike(*given, lambda ours, other: theirs[ours] is other, numbers):
                raise Unlike(str(b.target))
        if [theirs[x] if isinstance(x, fx.Node) else x for x in first.results] != recording.results:
            raise Unlike("the results")
        for name in self._constants.values():
            if not _is_equal(first.constants[name], recording.constants.get(name)):
                raise Unlike(name)
        return theirs

    def at(self, recording: Recording) -> ExportedProgram:
        """Return the export at the length of ``recording``. Raises Unlike if more than numbers differs."""
        theirs = self._beside(recording, lambda x, y: True)
        made, copies = copied_export(self._exported)
        for node, its_copy in copies.items():
            self._resize(node, its_copy, theirs)
        made._constants = {target: recording.constants[name] for target, name in self._constants.items()}
        return made

    def _resize(self, node: fx.Node, its_copy: fx.Node, theirs: Mapping[fx.Node, fx.Node]) -> None:
        twin = self._twins.get(node)
        if isinstance(twin, fx.Node):  # parameters and constants keep their shapes
            its_copy.meta["val"] = theirs[twin].meta.get("val", node.meta.get("val"))
        if isinstance(twin, fx.Node) and twin.target is node.target and node.target is not getitem:
            call = theirs[twin]
            ours, recorded = (its_copy.args, its_copy.kwargs), (call.args, call.kwargs)
            numbers = pytree.tree_map(lambda a, b: a if isinstance(a, fx.Node) else b, ours, recorded)
            its_copy.args, its_copy.kwargs = numbers


def copied_export(exported: ExportedProgram) -> tuple[ExportedProgram, dict[fx.Node, fx.Node]]:
    """Return ``exported`` with a graph of its own, and each node's copy."""
    made, (graph, copies) = copy.copy(exported), copied_graph(exported.graph)
    made._graph_module = Unwritten(exported.graph_module, graph)
    return made, copies


def _drop_checks(graph: fx.Graph) -> None:
    """Erase calls without a result by which export checks shapes."""
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is not None and not schema.returns and not schema.is_mutable and not node.users:
            graph.erase_node(node)


def _alike(
    first: Any, other: Any, nodes: Callable[[fx.Node, Any], bool], numbers: Callable[[Any, Any], bool] = eq
) -> bool:
    """Return whether two arguments have one structure, equal flags, and ``nodes`` and ``numbers`` that are alike."""

    def is_alike(a: Any, b: Any) -> bool:
        if isinstance(a, fx.Node):
            return nodes(a, b)
        return type(a) is type(b) and (numbers(a, b) if type(a) in (int, float) else bool(a == b))

    (ours, structure), (theirs, other_structure) = pytree.tree_flatten(first), pytree.tree_flatten(other)
    return structure == other_structure and all(map(is_alike, ours, theirs))


def _is_equal(first: Any, other: Any) -> bool:
    """Return whether both constants are plain tensors with the same values."""
    if not all(has_values(value) and value.device.type == "cpu" for value in (first, other)):
        return False
    return first is other or fingerprint(first.detach()) == fingerprint(other.detach())
