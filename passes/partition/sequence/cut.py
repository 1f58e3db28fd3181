"""cut_sequence(program, cp): the program over all tokens becomes that of one rank of cp, over its tokens."""

from __future__ import annotations

from torch import fx

from passes.moe.layers import Experts
from passes.moe.sorting import sort_plainly
from passes.partition.sequence.counted_rows import count_rows
from passes.partition.sequence.facts import Context
from passes.partition.sequence.lengthen import lengthen
from passes.partition.sequence.partition import partition
from passes.partition.sequence.refusals import op
from passes.partition.sequence.repeated_rows import repeat_rows
from passes.partition.sequence.types import decide_types
from passes.program.ops.aten import aten, is_pointwise, shape_of
from passes.program.program import Program
from passes.program.source_lines import where_of


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
