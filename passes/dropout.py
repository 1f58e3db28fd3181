"""Dropout draws from a stream that is named, not from a global state that depends on the layout.

    stream = hash(seed, step, global microbatch, which op) for I, R and P: the same mask on all tp ranks
             … and the tp rank for V: each rank its own
             … and the cp rank if ranks hold different tokens of the value; values replicated on all of them draw alike

So masks do not depend on pp or dp, recomputation and replay draw them again, and outside the parallel regions they do
not depend on tp either. If the plan has named each number (``dropout: layout_invariant``), its name decides it, the
same for every layout:

    dropout(x, p)   →   counted_dropout(x, p, random, place)

    site      the number of the op among those that draw
    sample    a sequence of the global batch: by the batch dim of the value, and its stride
    element   a place in one sequence's part of the full value

``place`` says which elements of the full value this rank has: of tp its slices, of cp its chunks of each sequence. The
fused attention draws inside of a kernel, in an order of its own. Spelled out it keeps its scores: that is the price of
masks that are the same for every layout.

    y = dropout(softmax(q kᵀ · scale + mask)) v      q [b, h, s, d], k and v [b, g, t, d]

Needs:   ops of this rank's sizes (passes.localize), and ``meta["placement"]`` of every random one.
Leaves:  no op that draws from the default generator.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes.base import LowerContext, StageGraph
from passes.errors import PlanError
from passes.moe import exchange
from passes.ops import dropout as ops
from passes.partition.batch.mixing import batch_runs, is_in_line
from passes.partition.sequence import facts
from passes.partition.sequence.partition import scores_of
from passes.program.builder import Builder
from passes.program.ops.aten import aten, is_random, named, ops_named, shape_of
from passes.program.ops.sequence import gather_sequence, local_rows, sum_over_ranks
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.walks import readers, walk
from passes.types.types import Draw, Placement, Run

WHOLE_AGAIN = (gather_sequence, sum_over_ranks)
OF_ROWS = (exchange.name_rows, exchange.drop_rows)


def name_streams(stage: StageGraph, context: LowerContext) -> None:
    """Replace dropout, and attention with dropout, by calls that name their stream."""
    graph = stage.graph
    cp = context.axes.get("cp")
    own = names_of_own_tokens(context.lowering.program) if cp is not None else frozenset()
    for node in list(graph.nodes):
        if not is_draw(node):
            continue
        handle = stage.handle("random", context.random)
        origin = node.meta["origin"]
        name = f"{origin}/cp {cp.rank}" if cp is not None and origin in own else origin
        with graph.inserting_before(node):
            # a stable number of the op
            number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
            new = counted(node, context, handle) or _streamed(node, handle, number)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _streamed(node: fx.Node, random: fx.Node, number: int) -> fx.Node:
    """Return the call that draws from the stream of that number."""
    graph, stream = node.graph, (number, node.meta["placement"].is_sharded)
    if node.target is aten.dropout.default:
        return graph.call_function(ops.stream_dropout, (node.args[0], node.args[1], random, *stream))
    target: Any = node.target
    is_own = target in ops.OWN_ATTENTION
    draw = ops.stream_attention if is_own or target is aten.scaled_dot_product_attention.default else ops.stream_random
    called = target.__name__ if is_own else target
    return graph.call_function(draw, (called, random, *stream, node.args, dict(node.kwargs)))


def is_draw(node: fx.Node) -> bool:
    """Return whether a call draws: dropout, attention with dropout, and ops that PyTorch tags as random (rand,
    bernoulli …)."""
    if node.target in ops.OWN_ATTENTION:
        return bool(node.kwargs.get("dropout_p"))
    return node.target in OF_ROWS or is_random(node)


def names_of_own_tokens(program: Program) -> frozenset[str]:
    """Return the values made of ``local_rows``, up to the collectives; all others are the same on every rank of cp."""
    own = program.graph.graph.find_nodes(op="call_function", target=local_rows)
    found = walk(own, readers, into=lambda n: n.op == "call_function" and n.target not in WHOLE_AGAIN)
    return frozenset(node.name for node in found)


def counted(node: fx.Node, context: LowerContext, random: fx.Node) -> fx.Node | None:
    """Return the call that takes the place of ``node``, of a stage; None if the plan has no names for its numbers."""
    draw: Draw | None = node.meta.get("draw")
    if draw is None:
        return None
    graph = node.graph
    if node.target is exchange.name_rows:
        return graph.call_function(ops.row_names, (random, place_of(draw, node, context), torch.device(context.device)))
    if node.target is exchange.drop_rows:
        args: Any = node.args
        rows, p, names, sites = args
        draw = replace(draw, site=sites[context.place.get("ep", 0)])
        place = place_of(draw, node, context, first=len(shape_of(node)) - len(draw.shape))
        return graph.call_function(ops.dropout_of_rows, (rows, p, random, place, names))
    place = place_of(draw, node, context)
    given = named(node)
    if node.target is aten.dropout.default:
        return graph.call_function(ops.counted_dropout, (node.args[0], node.args[1], random, place))
    kind = KINDS[node.target]
    like: Any = given.get("self", given.get("input"))
    if kind == BERNOULLI:
        return graph.call_function(ops.counted_bernoulli, (given.get("p", like), random, place, like))
    value = node.meta["val"]
    function = ops.counted_uniform if kind == UNIFORM else ops.counted_normal
    return graph.call_function(function, (random, place, value.dtype, torch.device(context.device)))


def place_of(draw: Draw, node: fx.Node, context: LowerContext, first: int = 0) -> ops.SampleElements:
    """Return the elements of the full microbatch that this rank has. ``first``: the dim of ``node`` that is the draw's
    first."""
    ranges: list[ops.Ranges] = [((0, size),) for size in draw.shape]
    if draw.cut is not None:
        cp = context.axes["cp"]
        ranges[draw.cut.dim] = _chunks(draw.cut, cp.size, cp.rank)
    placement: Placement = node.meta["placement"]
    if placement.is_sharded:
        axis = context.axis_of(node)
        dim = placement.dim - first
        ranges[dim] = _of(ranges[dim], _held(placement, axis.size, axis.rank))
    return ops.SampleElements(draw.site, draw.shape, tuple(ranges), draw.batch, draw.by_sample)


def _held(placement: Placement, tp: int, rank: int) -> ops.Ranges:
    """Return this rank's ranges of the sharded dim. Padding, a copy of the last element, has that element's numbers."""
    end, found = sum(placement.sizes), []
    for (start, stop), num_data in zip(placement.slices(tp, rank), placement.data_sizes(tp, rank), strict=True):
        found += [(start, start + num_data)] if num_data else []
        found += [(end - 1, end)] * (stop - start - num_data)
    return tuple(found)


def _chunks(cut: Placement, cp: int, rank: int) -> ops.Ranges:
    """Return the chunks of each of the sequences that are concatenated in a dim."""
    found, start = [], 0
    for segment in cut.segments:
        found += [(start + a, start + b) for a, b in facts.rows(segment.size, cp, rank)]
        start += segment.size
    return tuple(found)


def _of(whole: ops.Ranges, parts: ops.Ranges) -> ops.Ranges:
    """Return ``parts``, in their order, of the concatenation of the ranges ``whole``."""
    found = []
    for a, b in parts:
        start = 0
        for first, end in whole:
            low, high = max(a, start), min(b, start + end - first)
            if low < high:
                found.append((first + low - start, first + high - start))
            start += end - first
    return tuple(found)


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
        found = _of_batch(node, runs, micro) if node in on_batch else _of_sizes(program, node, runs, micro)
        node.meta["draw"] = Draw(site, shape_of(node), *found)


def _of_batch(node: fx.Node, runs: Runs, micro: int) -> tuple[Run | None, bool]:
    """Return the dim in which the sequences of a value that follows the batch stand."""
    found = runs[node]
    if micro == 1:
        return None, True
    if found is None:
        raise _refused(node, "depends on the batch in an unsupported way")
    if len(found) != 1 or next(iter(found))[2] != micro:
        raise _refused(node, f"holds the {micro} sequences of a microbatch in an unsupported layout")
    return next(iter(found)), True


def _of_sizes(program: Program, node: fx.Node, runs: Runs, micro: int) -> tuple[Run | None, bool]:
    """Return the same of numbers that are drawn without the batch: a drop path draws one for each sequence, other ops
    for all.

    They are for a sequence each if their first dim is aligned with the batch of the other operands.
    """
    run = 0, 1, micro
    if shape_of(node)[:1] != (micro,) or not is_in_line(program, node, run, runs):
        return None, False
    return None if micro == 1 else run, True


def _refused(node: fx.Node, what: str) -> PlanError:
    return PlanError(
        f"dropout: layout_invariant: {node.target} {what}, {list(shape_of(node))}",
        where=where_of(node),
        fix=(
            "write dropout: fast, or draw with F.dropout, torch.rand or torch.bernoulli, with the batch as the "
            "first dim"
        ),
    )


def spell_out_attention(program: Program) -> None:
    """Write out every attention that draws, in place."""
    graph = program.graph.graph
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        if is_random(node):
            node.replace_all_uses_with(_spelled(Builder(graph, node, node), named(node)))
            graph.erase_node(node)
    program.graph.recompile()


def _spelled(build: Builder, given: dict[str, Any]) -> fx.Node:
    q, k, v, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    if given.get("enable_gqa"):
        k, v = (build.repeated(x, len(shape_of(x)) - 3, shape_of(q)[-3] // shape_of(x)[-3]) for x in (k, v))
    scores = scores_of(build, q, k, given["scale"])
    if given["is_causal"]:
        mask = _triangle(build, scores)
    shares = _shares(build, scores, mask)
    shares = build.call(aten.dropout.default, shares, given["dropout_p"], True)
    return build.call(aten.matmul.default, shares, v)


def _shares(build: Builder, scores: fx.Node, mask: fx.Node | None) -> fx.Node:
    """Return the softmax of the scores; a query that may see no key at all has zeros, as in the fused op."""
    if mask is None or mask.meta["val"].dtype != torch.bool:
        scores = scores if mask is None else build.call(aten.add.Tensor, scores, mask)
        return build.call(aten.softmax.int, scores, -1)
    least = torch.finfo(scores.meta["val"].dtype).min
    shares = build.call(aten.softmax.int, build.call(aten.where.ScalarOther, mask, scores, least), -1)
    return build.call(aten.where.ScalarOther, mask, shares, 0)


def _triangle(build: Builder, scores: fx.Node) -> fx.Node:
    """Return a mask that is True if a key stands before its query, or at it."""
    rows, columns = shape_of(scores)[-2:]
    places = [
        build.call(aten.reshape.default, build.call(aten.arange.default, max(shape), device=torch.device("cpu")), shape)
        for shape in ([rows, 1], [1, columns])
    ]
    return build.call(aten.ge.Tensor, *places)
