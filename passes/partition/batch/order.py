"""Find values computed from operands that have the sequences in different orders along one dim.

    x.view(b·h, …) * y.repeat(h, 1, 1)      of x every h rows are one sequence, of y every b-th row is

Numbers of a batch in another order are those of other sequences: a microbatch would compute other values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import fx

from passes.partition.batch.flow import Run
from passes.program.ops.aten import aten, packet_of, shape_of
from passes.program.program import Program
from passes.rules.call import operands_of
from passes.rules.table import rule_of

Runs = Mapping[fx.Node, frozenset[Run] | None]


def batch_size(program: Program) -> int:
    return next((n.meta["val"].shape[0] for n in program.graph.graph.nodes if n.name in program.inputs), 1)


def in_other_orders(program: Program, on_batch: Collection[fx.Node], runs: Runs) -> list[fx.Node]:
    """Nodes that read two orders of the batch; none if only one sequence was captured. ``runs``: of the batch."""
    size = batch_size(program)
    if size == 1:
        return []
    return [node for node in program.graph.graph.nodes if node in on_batch and _reads_two(node, runs, size)]


def may_repeat_batch(node: fx.Node) -> bool:
    """Of a capture of one sequence: whether an op repeats all of its dim, the first or one behind a new dim."""
    if packet_of(node.target) is not aten.expand:
        return False
    shape, before = shape_of(node), shape_of(node.all_input_nodes[0])
    added = len(shape) - len(before)
    pairs = zip((1,) * added + before, shape, (*shape[1:], 0), strict=True)
    return any(old == 1 < new and (dim == added or then == 1) for dim, (old, new, then) in enumerate(pairs))


def _reads_two(node: fx.Node, runs: Runs, size: int) -> bool:
    """Whether operands that hold the sequences on one factor of the call have them in two orders."""
    read = operands_of(node) if node.op == "call_function" else ()
    found = {(i, *run) for i, operand in enumerate(read) for run in _certain(operand, runs, size)}
    rule = rule_of(node) if len({step for *_, step in found}) > 1 else None
    orders = {(rule.sole(i, dim), step) for i, dim, step in found} if rule is not None else set()
    factors = [factor for factor, _ in orders if factor is not None]
    return len(factors) > len(set(factors))


def _certain(operand: fx.Node, runs: Runs, size: int) -> Iterator[tuple[int, int]]:
    """(dim, distance of two sequences) if all sequences are on one dim, evenly."""
    found = runs.get(operand) or frozenset()
    if len(found) == 1:
        ((dim, step, count),) = found
        if count == size and shape_of(operand)[dim] % (step * count) == 0:
            yield dim, step
