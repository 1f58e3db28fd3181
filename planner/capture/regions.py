"""Regions without gradients (``torch.no_grad()``): their calls stand in line, and read values through ``detach``.

    exported                                             flat, marked               stopped
    wrap_with_set_grad_enabled(False, body, h)           mul(h, 2)  no_grad         mul(detach(h), 2)
        body(x): mul(x, 2)

Export gives a region a graph of its own; PyTorch's decompositions would put it in line without a stop. A flat graph is
compared with recorded calls, one by one, while it is marked; all that comes later sees ``detach`` alone.
"""

import copy
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from passes.errors import PlanError
from passes.program.ops.aten import arguments, aten, has_floats, nodes_in, written_by
from passes.program.ops.groups import FILLED
from passes.program.program import Unwritten
from passes.program.source_lines import origin_of, where_of
from planner.capture.functional import viewed

NO_GRAD = "no_grad"  # the mark


def copied_export(exported: ExportedProgram) -> tuple[ExportedProgram, dict[fx.Node, Any]]:
    """``exported`` with a flat graph of its own, marked; each node with its copy."""
    made, graph, copies, parts = copy.copy(exported), fx.Graph(), dict[fx.Node, Any](), dict[str, Any]()
    _copy(exported.graph_module, graph, copies, parts)
    made._graph_module = Unwritten(parts, graph)
    return made, copies


def _copy(module: fx.GraphModule, graph: fx.Graph, copies: dict[fx.Node, Any], parts: dict[str, Any]) -> None:
    """All nodes that have no copy yet, under the same names. ``parts``: gets the attributes that they read."""
    for node in module.graph.nodes:
        if _is_region(node):
            copies[node] = _in_line(module, node, graph, copies, parts)
        elif node.target is getitem and _is_region(node.args[0]):
            copies[node] = copies[node.args[0]][node.args[1]]
        elif node not in copies and not any(map(_is_region, node.users if node.op == "get_attr" else ())):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].name = node.name
            if node.op == "get_attr":
                parts[str(node.target)] = getattr(module, str(node.target))


def _in_line(
    module: fx.GraphModule, region: fx.Node, graph: fx.Graph, copies: dict[fx.Node, Any], parts: dict[str, Any]
) -> Any:
    """Copy the calls of a region; returns its results."""
    args: Any = region.args
    has_gradients, body, *operands = args
    inner = getattr(module, str(body.target))
    output = inner.graph.output_node()
    given = fx.map_arg(tuple(operands), copies.__getitem__)
    copies.update(zip(inner.graph.find_nodes(op="placeholder"), given, strict=True))
    copies[output] = None
    before = len(graph.nodes)
    _copy(inner, graph, copies, parts)
    for made in list(graph.nodes)[before:] if not has_gradients else ():
        made.meta[NO_GRAD] = True
    return fx.map_arg(output.args[0], copies.__getitem__)


def _is_region(node: Any) -> bool:
    target: Any = node.target if isinstance(node, fx.Node) else None
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() == "wrap_with_set_grad_enabled"


def stop_gradients(graph: fx.Graph) -> None:
    """Marked calls read values that have a gradient through ``detach``; the marks go.

    Raises PlanError at a write that autograd does not see, into memory of a value with a gradient: in one process the
    gradient passes as if nothing had been written.
    """
    memory = _Memory()
    for node in list(graph.nodes):
        for value in node.all_input_nodes if node.meta.pop(NO_GRAD, False) else ():
            if memory.has_gradient(value) and not (_changes_layout(node) and value is node.args[0]):
                with graph.inserting_before(node):
                    stop = graph.call_function(aten.detach.default, (value,))
                stop.meta = origin_of(node) | {"val": value.meta["val"].detach()}
                node.replace_input_with(value, stop)
                memory.note(stop)
        memory.note(node)


class _Memory:
    """Owns the memory of each value, by the node that made it; which memory is ``filled`` with values that have a
    gradient; and the values that are ``cut`` off from the gradient of their memory.
    """

    def __init__(self) -> None:
        self._maker: dict[fx.Node, fx.Node] = {}
        self._filled: set[fx.Node] = set()
        self._cut: set[fx.Node] = set()

    def has_gradient(self, value: fx.Node) -> bool:
        return self._maker[value] in self._filled and value not in self._cut

    def note(self, node: fx.Node) -> None:
        source = viewed(node)
        self._maker[node] = node if source is None else self._maker[source]
        if source in self._cut or node.target is aten.detach.default:
            self._cut.add(node)
        gives = has_floats(node) and node.target not in FILLED and any(map(self.has_gradient, node.all_input_nodes))
        if node.op == "placeholder" and isinstance(value := node.meta.get("val"), torch.Tensor):
            gives = value.requires_grad
        if gives and source is None:
            self._filled.add(node)
        for target in _written(node):
            self._write(node, target, gives)

    def _write(self, node: fx.Node, target: fx.Node, gives: bool) -> None:
        maker = self._maker[target]
        if target in self._cut and maker.op != "placeholder" and (gives or maker in self._filled):
            raise PlanError(
                "the forward writes in place into a value that has a gradient, under torch.no_grad() or through "
                ".detach(): a plan cannot keep its gradient",
                where=where_of(node),
                fix="write it out of place (`x = x * 2` for `x.mul_(2)`), or where autograd sees it",
            )
        if gives:
            self._filled.add(maker)


def _changes_layout(node: fx.Node) -> bool:
    """Whether a call changes its first operand itself, and none of its elements: ``t_``, ``unsqueeze_``, ``set_``."""
    return torch.Tag.inplace_view in getattr(node.target, "tags", ())


def _written(node: fx.Node) -> list[fx.Node]:
    """The values with elements that a call overwrites."""
    given = {} if node.op != "call_function" or _changes_layout(node) else arguments(node)
    return [n for name in written_by(node.target) for n in nodes_in(given.get(name))]
