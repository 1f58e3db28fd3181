"""cut_sequence(program, cp): the program over all tokens becomes that of one rank of cp, over its tokens.

The mean of a loss over rows that are cut: a rank's sum, over the number of all rows that count.

    cross_entropy(x, labels)   →   cross_entropy(x, labels, reduction="sum") / sum(labels ≠ ignored)

As many rows count as in the whole target, which each rank has. Of targets that are probabilities every row counts:
that mean is 1/cp of a rank's (``Form.MEAN``).

repeat_rows(program): rows that are picked by a constant 0, 0, 1, 1, … are each repeated.

    x[arange(n).repeat_interleave(k)]   →   x.reshape(n, 1, …).expand(n, k, …).reshape(n · k, …)

An index reads all rows; of a repetition every rank of cp computes that of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from passes.moe.domain import Builder
from passes.moe.layers import Experts
from passes.moe.sorting import sort_plainly
from passes.partition.loss.loss_ops import MEAN, SUM
from passes.partition.options.base import Option
from passes.partition.options.forms import Form
from passes.partition.sequence.facts import Context, Types
from passes.partition.sequence.lengthen import lengthen
from passes.partition.sequence.partition import partition
from passes.partition.sequence.refusals import op
from passes.partition.sequence.types import decide_types
from passes.program.constants import computed, is_made_of
from passes.program.ops.aten import aten, is_pointwise, named, shape_of
from passes.program.ops.groups import CROSS_ENTROPIES
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.walks import in_order
from passes.program.weights import is_weight
from passes.types.types import I, P


def cut_sequence(program: Program, cp: int, experts: Experts) -> Context:
    """Rewrite ``program`` in place; returns the facts of the sharding. Inputs stay full: ranks take their tokens of
    them.

    Raises PlanError if there is no sequence, if one does not divide by 2·cp, and for products that mix its tokens.
    """
    if cp == 1:
        return Context()
    _tell_operands_apart(program.graph.graph)
    repeat_rows(program.graph.graph)
    lengthen(program.graph.graph, cp)
    _loss_is(program)
    types = decide_types(program, cp, sort_plainly(program, experts))
    for node, size in types.undivided:
        what = f"a sequence of {size} tokens is not divisible by 2·cp = {2 * cp}: every rank of cp computes it in full"
        program.rewrites.append((what, where_of(node)))
    for node in types.begun:
        what = f"cp shards a sequence from {op(node)} on; every rank of cp computes what leads to it in full"
        program.rewrites.append((what, where_of(node)))
    for node in program.graph.graph.nodes:
        if node in types.recut:
            program.rewrites.append((f"every rank of cp computes {op(node)} for all tokens", where_of(node)))
    count_rows(program.graph.graph, types)
    program.graph.graph = partition(program.graph.graph, types, program.node(program.loss))
    _loss_is(program)
    return Context(cp, tuple(sorted(types.lengths)))


def _loss_is(program: Program) -> None:
    """Set the program's loss to the graph's result."""
    (loss,) = program.graph.graph.output_node().args[0]  # pyright: ignore
    program.loss = loss.name  # pyright: ignore
    program.graph_changed()


def _tell_operands_apart(graph: fx.Graph) -> None:
    """Queries that are their own keys become two values: one stays cut, the other is gathered."""
    for node in list(graph.nodes):
        if node.op != "call_function" or is_pointwise(node.target):
            continue
        for position in range(1, len(node.args)):
            value = node.args[position]
            if isinstance(value, fx.Node) and value in node.args[:position]:
                with graph.inserting_before(node):
                    same = graph.call_function(aten.reshape.default, (value, list(shape_of(value))))
                same.meta = dict(value.meta)
                node.update_arg(position, same)


# ---- the mean of a loss over rows that are cut: a rank's sum, over the number of all rows that count


def count_rows(graph: fx.Graph, types: Types) -> None:
    """Rewrite ``graph``, and type what is new."""
    for node in list(graph.nodes):
        if node.target in CROSS_ENTROPIES and named(node)["reduction"] == MEAN:
            option = types.options.get(node)
            if option is not None and option.form is Form.SUM:
                _count(graph, node, types)


def _count(graph: fx.Graph, node: fx.Node, types: Types) -> None:
    given: dict[str, Any] = named(node)
    build = Builder(graph, node, node)
    names = [argument.name for argument in node.target._schema.arguments]  # pyright: ignore
    total = build.call(node.target, *({**given, "reduction": SUM}[name] for name in names))
    count = build.call(aten.sum.default, _weights_of_rows(build, given), grad=False)
    mean = build.call(aten.div.Tensor, total, count)
    types.options |= {total: types.options[node], mean: Option((P, I), P, Form.PARTIAL)}
    types.natives |= {total: P, mean: P}
    node.replace_all_uses_with(mean)


def _weights_of_rows(build: Builder, given: dict[str, Any]) -> fx.Node:
    target, weight = given["target"], given["weight"]
    valid = build.call(aten.ne.Scalar, target, given["ignore_index"])
    if weight is None:
        return valid
    safe = build.call(aten.mul.Tensor, target, valid)
    return build.call(aten.mul.Tensor, build.call(aten.index.Tensor, weight, [safe]), valid)


# ---- repeat_rows(program): rows that are picked by a constant 0, 0, 1, 1, … are each repeated


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
