"""Dropout draws from a stream that is named, not from a global state that depends on the layout.

    stream = hash(seed, step, global microbatch, which op) for I, R and P: the same mask on all tp ranks
             … and the tp rank for V: each rank its own
             … and the cp rank if ranks hold different tokens of the value; values replicated on all of them draw alike

If the plan has named each number (``dropout: layout_invariant``), names decide them (passes.counted_draws).

So masks do not depend on pp or dp, recomputation and replay draw them again, and outside the parallel regions they do
not depend on tp either.

Needs:   every random op carries ``meta["placement"]``.
Leaves:  no op that draws from the default generator.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx

from passes.base import LowerContext, StageGraph
from passes.counted_draws import OF_ROWS, counted
from passes.ops.dropout import OWN_ATTENTION, stream_attention, stream_dropout, stream_random
from passes.partition.sequence.own_tokens import names_of_own_tokens
from passes.program.ops.aten import is_random

aten = torch.ops.aten


def name_streams(stage: StageGraph, context: LowerContext) -> None:
    """Replace dropout, and attention with dropout, by calls that name their stream."""
    graph, handle = stage.graph, None
    cp = context.axes.get("cp")
    own = names_of_own_tokens(context.lowering.program) if cp is not None else frozenset()
    for node in list(graph.nodes):
        if not is_draw(node):
            continue
        if handle is None:
            stage.root.random = context.random  # pyright: ignore
            with graph.inserting_before(next(iter(graph.nodes))):
                handle = graph.create_node("get_attr", "random")
        origin = node.meta["origin"]
        name = f"{origin}/cp {cp.rank}" if cp is not None and origin in own else origin
        with graph.inserting_before(node):
            new = counted(node, context, handle) or _streamed(node, handle, _number(name))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _streamed(node: fx.Node, random: fx.Node, number: int) -> fx.Node:
    """The call that draws from the stream of that number."""
    graph, stream = node.graph, (number, node.meta["placement"].is_sharded)
    if node.target is aten.dropout.default:
        return graph.call_function(stream_dropout, (node.args[0], node.args[1], random, *stream))
    target: Any = node.target
    is_own = target in OWN_ATTENTION
    draw = stream_attention if is_own or target is aten.scaled_dot_product_attention.default else stream_random
    called = target.__name__ if is_own else target
    return graph.call_function(draw, (called, random, *stream, node.args, dict(node.kwargs)))


def is_draw(node: fx.Node) -> bool:
    """Dropout, attention with dropout, and other ops that PyTorch tags as random: rand, randn_like, bernoulli …"""
    if node.target in OWN_ATTENTION:
        return bool(node.kwargs.get("dropout_p"))
    return node.target in OF_ROWS or is_random(node)


def _number(name: str) -> int:
    """A stable number of an op, from its name in the captured graph."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
