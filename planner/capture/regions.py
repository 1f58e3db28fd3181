"""Calls without gradients (``torch.no_grad()``) read values through ``detach``.

    marked                   stopped
    mul(h, 2)  no_grad       mul(detach(h), 2)

A graph is compared with recorded calls, one by one, while it is marked; all that comes later sees ``detach`` alone.
"""

import copy

import torch
from torch import fx
from torch.export import ExportedProgram

from passes.errors import PlanError
from passes.program.ops.aten import aten, has_floats
from passes.program.ops.groups import FILLED
from passes.program.program import Unwritten, copied_graph
from passes.program.source_lines import origin_of, where_of
from planner.capture.functional import viewed, written_to
from planner.capture.gradients.autocast import NO_GRAD, mark_of
from planner.capture.memory_order import seen_through


def copied_export(exported: ExportedProgram) -> tuple[ExportedProgram, dict[fx.Node, fx.Node]]:
    """``exported`` with a graph of its own; each node with its copy."""
    made, (graph, copies) = copy.copy(exported), copied_graph(exported.graph)
    made._graph_module = Unwritten(exported.graph_module, graph)
    return made, copies


def stop_gradients(graph: fx.Graph) -> None:
    """Marked calls read values that have a gradient through ``detach``.

    Raises PlanError at a write that autograd does not see, into memory of a value with a gradient: in one process the
    gradient passes as if nothing had been written.
    """
    memory = _Memory()
    for node in list(graph.nodes):
        for value in node.all_input_nodes if mark_of(node, NO_GRAD) else ():
            if memory.has_gradient(value) and not (_changes_layout(node) and value is node.args[0]):
                with graph.inserting_before(node):
                    stop = seen_through(value, [(aten.detach.default, ())], origin_of(node))
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
        for target in () if _changes_layout(node) else written_to(node):
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
