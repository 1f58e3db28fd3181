"""Names every random number of a program by its use: (site, sample, element of the sample).

    site      the number of the op among those that draw
    sample    a sequence of the global batch: by the batch dim of the value, and its stride
    element   a place in one sequence's part of the value

The names are those of the full value, so every layout draws the same numbers (passes.ops.counted).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from passes.errors import PlanError
from passes.partition.batch.flow import batch_runs
from passes.program.ops.aten import aten, is_random, ops_named, shape_of
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.walks import readers, walk
from passes.rng.attention import spell_out_attention
from passes.types.draw import Draw, Run

UNIFORM, NORMAL, BERNOULLI = "uniform", "normal", "bernoulli"
KINDS = {
    **dict.fromkeys(ops_named("rand rand_like"), UNIFORM),
    **dict.fromkeys(ops_named("randn randn_like"), NORMAL),
    **dict.fromkeys(ops_named("bernoulli bernoulli.p"), BERNOULLI),
}


Runs = Mapping[fx.Node, frozenset[Run] | None]


def name_draws(program: Program, micro: int) -> None:
    """Write ``meta["draw"]`` of every op that draws. Raises PlanError, at its line, for one that cannot be named."""
    spell_out_attention(program)
    on_batch = set(walk(map(program.node, program.inputs), readers))
    runs = batch_runs(program, on_batch)
    random = [n for n in program.graph.graph.nodes if n.op == "call_function" and is_random(n)]
    for site, node in enumerate(random):
        if node.target is not aten.dropout.default and node.target not in KINDS:
            raise _refused(node, "draws without one number per element")
        find = _of_batch if node in on_batch else _of_sizes
        node.meta["draw"] = Draw(site, shape_of(node), *find(node, runs, micro))


def _of_batch(node: fx.Node, runs: Runs, micro: int) -> tuple[Run | None, bool]:
    """Of a value that follows the batch: in which dim its sequences stand."""
    found = runs[node]
    if micro == 1:
        return None, True
    if found is None:
        raise _refused(node, "depends on the batch in an unsupported way")
    if len(found) != 1 or next(iter(found))[2] != micro:
        raise _refused(node, f"holds the {micro} sequences of a microbatch in an unsupported layout")
    return next(iter(found)), True


def _of_sizes(node: fx.Node, runs: Runs, micro: int) -> tuple[Run | None, bool]:
    """Of numbers that are drawn without the batch: a drop path draws one for each sequence, other ops for all.

    They are for a sequence each if their first dim is aligned with the batch of the other operand.
    """
    reader, last = node, node
    while reader not in runs or not runs[reader]:
        last = reader
        if len(last.users) != 1 or shape_of(last) != shape_of(node):
            return None, False
        (reader,) = last.users
    first = len(shape_of(reader)) - len(shape_of(node))
    is_for_each = shape_of(last)[:1] == (micro,) and (first, 1, micro) in (runs[reader] or ())
    if micro == 1 and shape_of(node)[:1] == (1,):
        return None, first == 0
    return ((0, 1, micro), True) if is_for_each else (None, False)


def _refused(node: fx.Node, what: str) -> PlanError:
    return PlanError(
        f"dropout: layout_invariant: {node.target} {what}, {list(shape_of(node))}",
        where=where_of(node),
        fix=(
            "write dropout: fast, or draw with F.dropout, torch.rand or torch.bernoulli, with the batch as the "
            "first dim"
        ),
    )
