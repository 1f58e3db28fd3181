"""The graph of a model at other sizes, from its graph at first ones: the same calls, with the other sizes' numbers.

    first export      view(x, [2, 1024, 12, 64])      call 17 of its recording, with the same numbers
    recording         view(x, [2, 512, 12, 64])       call 17 of a forward at another length
    the other graph   view(x, [2, 512, 12, 64])       and the shape that the recording saw

A graph is made only if nothing but numbers differs:

    each call of the first graph is a call of the first recording, argument by argument, and so are its results
    each call of the other recording is that of the first, under the same modes, with the same operands and flags
    constants have the same values, and the forward's result the same structure

Otherwise the model branches on its sizes, or export records more than the calls: it is exported again.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from passes.program.ops.recorded import OWN_BACKWARD
from passes.program.unwritten import Unwritten
from planner.capture.again.operands import Operand, Recorded, Recording, batch_tensor, parameter
from planner.capture.same_forward import fingerprint


class Unlike(Exception):
    """Two graphs or recordings differ in more than numbers."""


class FirstExport:
    """Owns a copy of an export, made before it is rewritten, and which call of ``recording`` each node is.

    Raises Unlike if the recording is not that of the export.
    """

    def __init__(self, exported: ExportedProgram, recording: Recording) -> None:
        self._exported, self._first = exported, recording
        self._constants: dict[str, str] = {}  # of the export → name in the recording
        self._calls: dict[fx.Node, int] = {}
        self._operands: dict[fx.Node, Any] = {}  # node → its Operand, or a tuple of them
        self._next = 0
        module = exported.graph_module
        _drop_checks(module)
        names, kinds = recording.named(), {s.arg.name: s for s in exported.graph_signature.input_specs}
        for holder in module.graph.find_nodes(op="placeholder"):
            self._operands[holder] = _held(holder, kinds[holder.name], names)
        leaves = self._match(module)
        kept = [leaf for leaf in recording.output if isinstance(leaf, Operand)]
        if [leaf for leaf in leaves if isinstance(leaf, Operand)] != kept:
            raise Unlike("the results")
        recording.forget_values()

    # ---- the first graph as its recording

    def _match(self, module: fx.GraphModule) -> Any:
        """Find the call of every node; returns the operands of the module's results."""
        for node in module.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], lambda n: self._operands[n])
            if node.op == "call_function":
                self._operands[node] = self._operand(module, node)
        raise Unlike("no output")

    def _operand(self, module: fx.GraphModule, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            source: Any = self._operands[node.args[0]]  # pyright: ignore
            item: Any = node.args[1]
            return source[item] if isinstance(source, tuple) else Operand(source.origin, item)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._of_region(module, node)
        if not isinstance(node.target, torch._ops.OpOverload) or node.target is OWN_BACKWARD:
            raise Unlike(str(node.target))
        for number in range(self._next, len(self._first.calls)):
            call = self._first.calls[number]
            if call.target is node.target and self._is_same((node.args, dict(node.kwargs)), (call.args, call.kwargs)):
                self._next = number + 1
                self._calls[node] = number
                return Operand(number)
        raise Unlike(str(node))

    def _of_region(self, module: fx.GraphModule, node: fx.Node) -> tuple[Any, ...]:
        """A region under another mode is a module of its own; it computes in its place."""
        bodies = [n for n in node.all_input_nodes if n.op == "get_attr"]
        body = getattr(module, str(bodies[0].target), None) if len(bodies) == 1 else None
        if not isinstance(body, fx.GraphModule):
            raise Unlike(str(node.target))
        operands = node.args[node.args.index(bodies[0]) + 1 :]
        for holder, given in zip(body.graph.find_nodes(op="placeholder"), operands, strict=True):
            self._operands[holder] = self._operands[given]  # pyright: ignore
        return tuple(self._match(body))

    def _is_same(self, ours: Any, recorded: Any) -> bool:
        if isinstance(ours, fx.Node):
            if ours.op == "placeholder" and self._operands[ours] is None:
                return self._is_constant(ours, recorded)
            return self._operands[ours] == recorded
        return _alike(ours, recorded, self._is_same, lambda a, b: a == b)

    def _is_constant(self, holder: fx.Node, recorded: Any) -> bool:
        kinds = {s.arg.name: s.target for s in self._exported.graph_signature.input_specs}
        target = kinds[holder.name] or ""
        value = self._exported.constants.get(target)
        if not isinstance(recorded, Operand) or not _is_equal(value, self._first.held.get(str(recorded.origin))):
            return False
        self._operands[holder], self._constants[target] = recorded, str(recorded.origin)
        return True

    # ---- the graph of another recording

    def at(self, recording: Recording) -> ExportedProgram:
        """The export at the sizes of ``recording``. Raises Unlike if more than numbers differs."""
        first = self._first
        if len(first.calls) != len(recording.calls) or first.output != recording.output:
            raise Unlike("another number of calls, or other results")
        for ours, theirs in zip(first.calls, recording.calls, strict=True):
            if not _is_call_of(ours, theirs):
                raise Unlike(str(theirs.target))
        for name in self._constants.values():
            if not _is_equal(first.held[name], recording.held.get(name)):
                raise Unlike(name)
        made = copied_export(self._exported, lambda node: self._resized(node, recording))
        made._constants = {target: recording.held[name] for target, name in self._constants.items()}
        return made

    def _resized(self, node: fx.Node, recording: Recording) -> tuple[Any, Any, dict[str, Any]]:
        operands = self._operands.get(node)
        meta = dict(node.meta)
        if "val" in meta and operands is not None:
            meta["val"] = _values(operands, recording)
        number = self._calls.get(node)
        if number is None:
            return node.args, node.kwargs, meta
        call = recording.calls[number]
        return _with_numbers(node.args, call.args), _with_numbers(dict(node.kwargs), call.kwargs), meta


def _drop_checks(module: fx.GraphModule) -> None:
    """Calls without a result that export adds of its own, to check shapes."""
    for inner in (module for module in module.modules() if isinstance(module, fx.GraphModule)):
        for node in list(inner.graph.nodes):
            schema = getattr(node.target, "_schema", None)
            if schema is not None and not schema.returns and not schema.is_mutable and not node.users:
                inner.graph.erase_node(node)


def _held(holder: fx.Node, spec: Any, names: Mapping[str, Operand]) -> Operand | None:
    """The operand of a placeholder. None for a constant: the first call that reads it shows which it is."""
    if spec.kind is InputKind.USER_INPUT:
        return names[batch_tensor(str(holder.target))]
    return names[parameter(spec.target)] if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) else None


def _as_it_is(node: fx.Node) -> tuple[Any, Any, dict[str, Any]]:
    return node.args, node.kwargs, dict(node.meta)


def copied_export(
    exported: ExportedProgram, of: Callable[[fx.Node], tuple[Any, Any, dict[str, Any]]] = _as_it_is
) -> ExportedProgram:
    """``exported`` with a graph of its own. ``of``: arguments and meta of each node."""
    made = copy.copy(exported)
    made._graph_module = _copied_module(exported.graph_module, of)
    return made


def _copied_module(module: fx.GraphModule, of: Callable[[fx.Node], tuple[Any, Any, dict[str, Any]]]) -> fx.GraphModule:
    """``module`` and the regions in it once more, under the same names."""
    graph, env, parts = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, Any]()
    for node in module.graph.nodes:
        args, kwargs, meta = of(node)
        args, kwargs = fx.map_arg((args, kwargs), lambda n: env[n])
        made = env[node] = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        made.name, made.meta = node.name, meta
        if node.op == "get_attr":
            part = getattr(module, str(node.target))
            parts[str(node.target)] = _copied_module(part, of) if isinstance(part, fx.GraphModule) else part
    return Unwritten(parts, graph)


def _values(operands: Any, recording: Recording) -> Any:
    if isinstance(operands, tuple):
        return tuple(_values(inner, recording) for inner in operands)
    return recording.value(operands) if isinstance(operands, Operand) else operands


def _with_numbers(ours: Any, recorded: Any) -> Any:
    """The arguments of a node, with the numbers of a call."""
    if isinstance(ours, fx.Node):
        return ours
    if isinstance(ours, (tuple, list)):
        return type(ours)(_with_numbers(a, b) for a, b in zip(ours, recorded, strict=True))
    if isinstance(ours, dict):
        return {key: _with_numbers(value, recorded[key]) for key, value in ours.items()}
    return recorded


def _is_call_of(first: Recorded, other: Recorded) -> bool:
    same = first.target is other.target and first.state == other.state
    return same and _are_alike(first.args, other.args) and _are_alike(first.kwargs, other.kwargs)


def _are_alike(first: Any, other: Any) -> bool:
    return _alike(first, other, _are_alike, lambda a, b: True)


def _alike(first: Any, other: Any, inner: Callable[[Any, Any], bool], numbers: Callable[[Any, Any], bool]) -> bool:
    """Whether two arguments have one structure, the same flags, and numbers that ``numbers`` takes as equal."""
    if isinstance(first, Mapping):
        is_map = isinstance(other, Mapping) and first.keys() == other.keys()
        return is_map and all(inner(first[key], other[key]) for key in first)
    if isinstance(first, (tuple, list)):
        is_list = isinstance(other, (tuple, list)) and len(first) == len(other)
        return is_list and all(map(inner, first, other))
    if type(first) is not type(other):
        return False
    return numbers(first, other) if type(first) in (int, float) else bool(first == other)


def _is_equal(first: Any, other: Any) -> bool:
    """Of constants: whether both are plain tensors with the same values."""
    if not (_is_plain(first) and _is_plain(other)):
        return False
    return first is other or fingerprint(first.detach()) == fingerprint(other.detach())


def _is_plain(value: Any) -> bool:
    strided = isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.layout is torch.strided
    return strided and value.device.type == "cpu"
