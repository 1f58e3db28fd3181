"""Names every random number of a program by its use: (site, sample, element of the sample).

    site      the number of the op among those that draw
    sample    a sequence of the global batch: by the batch dim of the value, and its stride
    element   a place in one sequence's part of the value

The names are those of the full value, so every layout draws the same numbers (passes.ops.counted).

Attention with dropout, spelled out, so that each element of its dropout has a name.

    y = dropout(softmax(q kᵀ · scale + mask)) v      q [b, h, s, d], k and v [b, g, t, d]

The fused op draws inside of a kernel, in an order of its own. Spelled out it keeps its scores: that is the price of
masks that are the same for every layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from passes.canonical.emit import Emit, applied, viewed
from passes.errors import PlanError
from passes.partition.batch.flow import batch_runs
from passes.program.ops.aten import aten, is_random, named, ops_named, shape_of
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.walks import readers, walk
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


# ---- attention with dropout, spelled out, so that each element of its dropout has a name


KEPT = ("nn_module_stack", "stack_trace")


def spell_out_attention(program: Program) -> None:
    """In place: every attention that draws."""
    graph = program.graph.graph
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        if is_random(node):
            with graph.inserting_before(node):
                made = _spelled(_emitter(node), named(node))
            node.replace_all_uses_with(made)
            graph.erase_node(node)
    program.graph.recompile()
    program.graph_changed()


def _emitter(node: fx.Node) -> Emit:
    def emit(target: Any, args: Any, kwargs: Any, val: Any) -> fx.Node:
        made = node.graph.call_function(target, args, kwargs)
        made.meta = {key: node.meta[key] for key in KEPT if key in node.meta}
        read = [n for n in made.all_input_nodes if n.meta.get("grad")]
        made.meta |= {"val": val, "grad": bool(read) and val.dtype.is_floating_point}
        return made

    return emit


def _spelled(emit: Emit, given: dict[str, Any]) -> fx.Node:
    q, k, v, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    if given.get("enable_gqa"):
        k, v = (_repeated(emit, x, shape_of(q)[-3] // shape_of(x)[-3]) for x in (k, v))
    scale = shape_of(q)[-1] ** -0.5 if given["scale"] is None else given["scale"]
    order = [*range(len(shape_of(k)) - 2), len(shape_of(k)) - 1, len(shape_of(k)) - 2]
    scores = applied(emit, aten.matmul.default, q, applied(emit, aten.permute.default, k, order))
    scores = applied(emit, aten.mul.Tensor, scores, scale)
    if given["is_causal"]:
        mask = _triangle(emit, scores)
    shares = _shares(emit, scores, mask)
    shares = applied(emit, aten.dropout.default, shares, given["dropout_p"], True)
    return applied(emit, aten.matmul.default, shares, v)


def _shares(emit: Emit, scores: fx.Node, mask: fx.Node | None) -> fx.Node:
    """A query that may see no key at all has zeros, as in the fused op."""
    if mask is None or mask.meta["val"].dtype != torch.bool:
        scores = scores if mask is None else applied(emit, aten.add.Tensor, scores, mask)
        return applied(emit, aten.softmax.int, scores, -1)
    least = torch.finfo(scores.meta["val"].dtype).min
    shares = applied(emit, aten.softmax.int, applied(emit, aten.where.ScalarOther, mask, scores, least), -1)
    return applied(emit, aten.where.ScalarOther, mask, shares, 0)


def _triangle(emit: Emit, scores: fx.Node) -> fx.Node:
    """True if a key stands before its query, or at it."""
    rows, columns = shape_of(scores)[-2:]
    places = [_places(emit, scores, shape) for shape in ([rows, 1], [1, columns])]
    return applied(emit, aten.ge.Tensor, *places)


def _places(emit: Emit, scores: fx.Node, shape: list[int]) -> fx.Node:
    value = scores.meta["val"].new_empty(max(shape), dtype=torch.int64)
    made = emit(aten.arange.default, (max(shape),), {"device": value.device}, value)
    return viewed(emit, made, shape)


def _repeated(emit: Emit, x: fx.Node, times: int) -> fx.Node:
    """Each key head for all the query heads that read it."""
    *outer, heads, size, width = shape_of(x)
    apart = viewed(emit, x, [*outer, heads, 1, size, width])
    shape = [*outer, heads, times, size, width]
    spread = applied(emit, aten.expand.default, apart, shape)
    return viewed(emit, spread, [*outer, heads * times, size, width])
