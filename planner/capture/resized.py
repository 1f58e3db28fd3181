"""A captured model at another length or batch size: its first graph with other numbers, without another export.

    first export      view(x, [2, 1024, 12, 64])      call 17 of its recording, with the same numbers
    recording         view(x, [2, 512, 12, 64])       call 17 of a forward at another length
    the other graph   view(x, [2, 512, 12, 64])       and the shape that the recording saw

A graph is made only if nothing but numbers differs:

    each call of the first graph is a call of the first recording, argument by argument, and so are its results
    each call of the other recording is that of the first, under the same modes, with the same operands and flags
    constants have the same values, and the forward's result the same structure

Otherwise the model branches on its length, or export records more than the calls: it is exported again.
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
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from passes.program.program import Unwritten
from planner.capture.data_dependence import bodies_of, graph_modules
from planner.capture.graphs_equal import fingerprint
from planner.capture.model.exchange import has_values
from planner.capture.recording import Recording


class Unlike(Exception):
    """Two graphs or recordings differ in more than numbers."""


@dataclass
class Earlier:
    """Given to each capture of one model, for one loss and dtype. ``first``: the first export, if it can be resized;
    its calls are recorded when a second size is asked for, which is rare.

    ``traced``: the questions about tracing that must be answered truly (planner.capture.python.eager_answers).
    ``was_repeated``: whether a forward at another length was called twice, as the first was, and computed the same.
    That shows state which no attribute shows; more lengths are called once.
    """

    first: KeptExport | FirstExport | None = None
    traced: dict[Any, Any] = field(default_factory=dict)
    was_repeated: bool = False


@dataclass(frozen=True)
class KeptExport:
    """A copy of an export of ``inputs``, made before it is rewritten; no forward was recorded for it yet."""

    exported: ExportedProgram
    inputs: Mapping[str, torch.Tensor]


class FirstExport:
    """Owns a copy of an export, made before it is rewritten, and which call of ``recording`` each node is.

    Raises Unlike if the recording is not that of the export.
    """

    def __init__(self, exported: ExportedProgram, recording: Recording) -> None:
        self._exported, self._first = exported, recording
        self._constants: dict[str, str] = {}  # of the export → name in the recording
        self._twins: dict[fx.Node, Any] = {}  # node → that of the recording; of a region, a tuple of them
        self._calls = iter([node for node in recording.graph.nodes if isinstance(node.target, torch._ops.OpOverload)])
        self._specs = {s.arg.name: s for s in exported.graph_signature.input_specs}
        module = exported.graph_module
        _drop_checks(module)
        for holder in module.graph.find_nodes(op="placeholder"):
            if self._specs[holder.name].kind is InputKind.USER_INPUT:
                self._twins[holder] = recording.inputs[str(holder.target)]
            elif self._specs[holder.name].kind in (InputKind.PARAMETER, InputKind.BUFFER):
                self._twins[holder] = recording.parameters[self._specs[holder.name].target or ""]
        leaves = self._match(module)
        if [n for n in leaves if isinstance(n, fx.Node)] != [n for n in recording.results if isinstance(n, fx.Node)]:
            raise Unlike("the results")
        recording.forget_values()

    def _match(self, module: fx.GraphModule) -> Any:
        """Find the call of every node; returns the twins of the module's results."""
        for node in module.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], lambda n: self._twins[n])
            if node.op == "call_function":
                self._twins[node] = self._twin(module, node)
        raise Unlike("no output")

    def _twin(self, module: fx.GraphModule, node: fx.Node) -> Any:
        if node.target is getitem:
            source: Any = self._twins[node.args[0]]  # pyright: ignore
            item: Any = node.args[1]
            if isinstance(source, tuple):
                return source[item]
            return next(n for n in source.users if n.target is getitem and n.args[1] == item)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._of_region(module, node)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise Unlike(str(node.target))
        for call in self._calls:
            given = (node.args, node.kwargs), (call.args, call.kwargs)
            if call.target is node.target and _alike(*given, self._is_same):
                return call
        raise Unlike(str(node))

    def _of_region(self, module: fx.GraphModule, node: fx.Node) -> tuple[Any, ...]:
        """A region under another mode is a module of its own; it computes in its place."""
        found = list(bodies_of(module, node))
        if len(found) != 1:
            raise Unlike(str(node.target))
        ((body, holders, operands),) = found
        for holder, given in zip(holders, operands, strict=True):
            self._twins[holder] = self._twins[given]
        return tuple(self._match(body))

    def _is_same(self, ours: fx.Node, recorded: Any) -> bool:
        return self._twins[ours] is recorded if ours in self._twins else self._is_constant(ours, recorded)

    def _is_constant(self, holder: fx.Node, recorded: Any) -> bool:
        """Whether ``recorded`` is a constant's: the first call that reads one shows which it is."""
        target = self._specs[holder.name].target or ""
        held = self._first.constants.get(str(recorded.target)) if isinstance(recorded, fx.Node) else None
        if not _is_equal(self._exported.constants.get(target), held):
            return False
        self._twins[holder], self._constants[target] = recorded, str(recorded.target)
        return True

    def is_again(self, recording: Recording) -> bool:
        """Whether ``recording`` has the same calls, with the same numbers."""
        with suppress(Unlike):
            return bool(self._beside(recording, eq))
        return False

    def _beside(self, recording: Recording, numbers: Callable[[Any, Any], bool]) -> dict[fx.Node, fx.Node]:
        """Each call with that of ``recording``. Raises Unlike if they differ, or ``numbers`` in them are not alike."""
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
        """The export at the length of ``recording``. Raises Unlike if more than numbers differs."""
        theirs = self._beside(recording, lambda x, y: True)
        made, copies = copied_export(self._exported)
        for node, its_copy in copies.items():
            self._resize(node, its_copy, theirs)
        made._constants = {target: recording.constants[name] for target, name in self._constants.items()}
        return made

    def _resize(self, node: fx.Node, its_copy: fx.Node, theirs: Mapping[fx.Node, fx.Node]) -> None:
        twin = self._twins.get(node)
        if "val" in node.meta:
            its_copy.meta["val"] = _values(twin, node.meta["val"], theirs)
        if isinstance(twin, fx.Node) and twin.target is node.target and node.target is not getitem:
            call = theirs[twin]
            ours, recorded = (its_copy.args, its_copy.kwargs), (call.args, call.kwargs)
            numbers = pytree.tree_map(lambda a, b: a if isinstance(a, fx.Node) else b, ours, recorded)
            its_copy.args, its_copy.kwargs = numbers


def _drop_checks(module: fx.GraphModule) -> None:
    """Calls without a result that export adds of its own, to check shapes."""
    for inner in graph_modules(module):
        for node in list(inner.graph.nodes):
            schema = getattr(node.target, "_schema", None)
            if schema is not None and not schema.returns and not schema.is_mutable and not node.users:
                inner.graph.erase_node(node)


def copied_export(exported: ExportedProgram) -> tuple[ExportedProgram, dict[fx.Node, fx.Node]]:
    """``exported`` with a graph of its own; each node with its copy."""
    made, copies = copy.copy(exported), dict[fx.Node, fx.Node]()
    made._graph_module = _copied_module(exported.graph_module, copies)
    return made, copies


def _copied_module(module: fx.GraphModule, copies: dict[fx.Node, fx.Node]) -> fx.GraphModule:
    """``module`` and the regions in it once more, under the same names."""
    graph, parts = fx.Graph(), dict[str, Any]()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].name = node.name
        if node.op == "get_attr":
            part = getattr(module, str(node.target))
            parts[str(node.target)] = _copied_module(part, copies) if isinstance(part, fx.GraphModule) else part
    return Unwritten(parts, graph)


def _values(twin: Any, ours: Any, theirs: Mapping[fx.Node, fx.Node]) -> Any:
    """What a recording saw of a node; parameters and constants keep their shapes."""
    if isinstance(twin, tuple):
        return tuple(_values(a, b, theirs) for a, b in zip(twin, ours, strict=True))
    return theirs[twin].meta.get("val", ours) if isinstance(twin, fx.Node) else ours


def _alike(
    first: Any, other: Any, nodes: Callable[[fx.Node, Any], bool], numbers: Callable[[Any, Any], bool] = eq
) -> bool:
    """Whether two arguments have one structure, the same flags, ``nodes`` that are alike, and such ``numbers``."""

    def is_alike(a: Any, b: Any) -> bool:
        if isinstance(a, fx.Node):
            return nodes(a, b)
        return type(a) is type(b) and (numbers(a, b) if type(a) in (int, float) else bool(a == b))

    (ours, structure), (theirs, other_structure) = pytree.tree_flatten(first), pytree.tree_flatten(other)
    return structure == other_structure and all(map(is_alike, ours, theirs))


def _is_equal(first: Any, other: Any) -> bool:
    """Of constants: whether both are plain tensors with the same values."""
    if not all(has_values(value) and value.device.type == "cpu" for value in (first, other)):
        return False
    return first is other or fingerprint(first.detach()) == fingerprint(other.detach())
