"""The dims of a value that may hold the batch, from one capture: enough to see that an op runs along other dims.

    ids [b, t] → 0      embedding → 0      x.transpose(0, 1) → 1      x.view(b·h, t, d) → 0, in steps of h

A dim that is not named holds no sequence beside another; one that is named may. An op that is not known here makes all
its dependents unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, fx

from passes.program.constants import SHAPE_READERS
from passes.program.program import Program
from passes.rules.call import operands_of
from passes.rules.rule import RESULT, OpRule
from passes.rules.table import rule_of
from passes.types.draw import Run

Dims = frozenset[Run]


def batch_flow(program: Program, on_batch: Collection[fx.Node]) -> dict[fx.Node, frozenset[int] | None]:
    """Node → dims that may hold the batch; None if that is not known. Microbatches hold two sequences or more."""
    return dims_of(batch_runs(program, on_batch))


def dims_of(flow: Mapping[fx.Node, frozenset[Run] | None]) -> dict[fx.Node, frozenset[int] | None]:
    """The dims of runs."""
    return {node: None if runs is None else frozenset(dim for dim, *_ in runs) for node, runs in flow.items()}


def batch_runs(program: Program, on_batch: Collection[fx.Node]) -> dict[fx.Node, frozenset[Run] | None]:
    """The same, each dim with the distance of two sequences along it, and their number."""
    flow: dict[fx.Node, Dims | None] = {}
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            size = int(node.meta["val"].shape[0]) if node.name in program.inputs else 0
            flow[node] = frozenset({(0, 1, size)} if size else ())
        elif node.op == "call_function":
            flow[node] = _dims_of(node, flow) if node in on_batch else frozenset()
    return flow


def _anywhere(node: fx.Node) -> Dims:
    return frozenset((d, 1, n) for d, n in enumerate(_shape(node)))


def _dims_of(node: fx.Node, flow: dict[fx.Node, Dims | None]) -> Dims | None:
    """A sum along the batch leaves it anywhere, and so do lost positions; an operand that gives its shape alone
    passes on the dims of the result only."""
    rule, operands = rule_of(node), operands_of(node)
    if rule is None or any(flow.get(n) is None for n in node.all_input_nodes):
        return None
    found: set[Run] = set()
    for i, operand in enumerate(operands):
        for run in flow[operand] or ():
            carried = _carried(rule, i, run, node)
            if carried is None and i not in rule.unread:
                return _anywhere(node)
            found |= carried or set()
    return frozenset(found)


def _carried(rule: OpRule, operand: int, run: Run, node: fx.Node) -> set[Run] | None:
    """The runs in the result of the factors that hold the sequences; None where one of these is not there.

    Sequences that do not start and end with a factor, or lie unevenly on it, may be anywhere along its dim.
    """
    dim, distance, count = run
    found: set[Run] = set()
    step = 1
    for factor in rule.along(operand, dim):
        first, last, end = max(distance, step), min(distance * count, step * factor.size), step * factor.size
        if first < last or factor.size == count == 1:
            place = factor.at(RESULT)
            if place is None:
                return None
            even = first % step == 0 and last % first == 0 and end % last == 0 and first % distance == 0
            whole = (place.dim, 1, _shape(node)[place.dim])
            found.add((place.dim, place.inner * (first // step), last // first) if even else whole)
        step = end
    return found


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = node.meta["val"]
    return tuple(int(n) for n in (value if isinstance(value, Tensor) else value[0]).shape)


def follows_batch(program: Program) -> set[fx.Node]:
    """The nodes computed from the batch's values, not from their shapes alone."""
    found: set[fx.Node] = set()
    for node in program.graph.graph.nodes:
        reads = any(n in found for n in node.all_input_nodes) and node.target not in SHAPE_READERS
        if node.name in program.inputs or reads:
            found.add(node)
    return found
