"""Dropout draws from a stream that is named, not from a global state that the layout would disturb.

    stream = hash(seed, step, global microbatch, which op) for I, R and P: the same mask on all tp ranks
             … and the tp rank for V: each rank its own

So masks do not depend on pp or dp, recomputation and replay draw them again, and outside the parallel regions they do
not depend on tp either.

Needs:   every random op carries ``meta["placement"]``.
Leaves:  no op that draws from the default generator.
"""

from __future__ import annotations

import hashlib

import torch
from torch import fx

from passes.base import LowerContext, StageGraph
from passes.ops.attention import shared_key_attention
from passes.ops.dropout import stream_attention, stream_dropout, stream_random
from planner.graph.ops.aten import is_random

aten = torch.ops.aten


def name_streams(stage: StageGraph, context: LowerContext) -> None:
    """Replace dropout, and attention with dropout, by calls that name their stream."""
    graph, handle = stage.graph, None
    for node in list(graph.nodes):
        if not is_draw(node):
            continue
        if handle is None:
            stage.root.random = context.random  # pyright: ignore
            with graph.inserting_before(next(iter(graph.nodes))):
                handle = graph.create_node("get_attr", "random")
        stream = (_number(node.meta["origin"]), node.meta["placement"].is_sharded)
        with graph.inserting_before(node):
            if node.target is aten.dropout.default:
                new = graph.call_function(stream_dropout, (node.args[0], node.args[1], handle, *stream))
            else:
                draw = stream_attention if node.target in ATTENTION else stream_random
                new = graph.call_function(draw, (node.target, handle, *stream, node.args, dict(node.kwargs)))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


ATTENTION = {aten.scaled_dot_product_attention.default, shared_key_attention}


def is_draw(node: fx.Node) -> bool:
    """Dropout, attention with dropout, and what else PyTorch says to draw: rand, randn_like, bernoulli …"""
    return bool(node.kwargs.get("dropout_p")) if node.target is shared_key_attention else is_random(node)


def _number(name: str) -> int:
    """A stable number of an op, from its name in the captured graph."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
