"""repeat_rows(program): rows that are picked by a constant 0, 0, 1, 1, … are each repeated.

    x[arange(n).repeat_interleave(k)]   →   x.reshape(n, 1, …).expand(n, k, …).reshape(n · k, …)

An index reads all rows; of a repetition every rank of cp computes that of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from passes.moe.building import Builder
from passes.program.constants import computed, is_made_of
from passes.program.ops.aten import aten, shape_of
from passes.program.walks import in_order
from passes.program.weights import is_weight


def repeat_rows(graph: fx.Graph) -> None:
    """Rewrite ``graph`` in place."""
    for node, rows, times in list(_repetitions(graph)):
        build, (size, *rest) = Builder(graph, node, node), shape_of(rows)
        apart = build.call(aten.reshape.default, rows, [size, 1, *rest])
        each = build.call(aten.expand.default, apart, [size, times, *rest])
        node.replace_all_uses_with(build.call(aten.reshape.default, each, [size * times, *rest]))
        graph.erase_node(node)


def _repetitions(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, int]]:
    """Calls, with the value that has the rows, and how often each is repeated."""
    known: dict[fx.Node, Tensor | None] = {}
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        rows, (index, *more) = node.args
        if more or not isinstance(index, fx.Node) or not isinstance(rows, fx.Node) or is_weight(rows):
            continue
        size, count = shape_of(rows)[0], index.meta["val"].numel()
        if index.meta["val"].dim() != 1 or count % size or not rows.meta.get("grad"):
            continue
        if index not in known:
            known[index] = _value(index)
        value, times = known[index], count // size
        if value is not None and torch.equal(value, torch.arange(count) // times):
            yield node, rows, times


def _value(index: fx.Node) -> Tensor | None:
    """Of a value that is made of numbers alone."""
    if not is_made_of(index, ()) or any(n.op != "call_function" for n in in_order([index])):
        return None
    values: dict[fx.Node, Tensor] = {}
    for node in in_order([index]):
        values[node] = computed(node, values.__getitem__)
    return values[index]
