"""Lower context-parallel placeholders of the captured graph to collectives on the axis cp.

    local_rows          this rank's chunks of a full value                         (passes.ops.context)
    gather_sequence     all-gather, backward reduce-scatter                        (passes.ops.context)
    sum_over_ranks      all-reduce both ways                                       (passes.ops.collectives)
    causal_attention    of this rank's rows to the keys before them, by chunks     (passes.ops.causal_attention)
    gathered_attention  of this rank's rows, to keys that it gathers itself        (passes.ops.gathered_attention)

Needs:   a program over one cp rank's tokens (passes.partition.sequence).
Leaves:  no call of passes.program.ops.sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from passes.base import LowerContext, StageGraph
from passes.insert_collectives import axis_node
from passes.ops.causal_attention import causal_attention
from passes.ops.collectives import g_f
from passes.ops.context import gather_sequence, local_rows
from passes.ops.gathered_attention import FLASH, gathered_attention
from passes.program.ops import sequence
from passes.program.ops.aten import is_random

BECOMES: dict[Any, tuple[Callable[..., Any], int]] = {  # and the argument position of the number of ranks
    sequence.local_rows: (local_rows, 2),
    sequence.gather_sequence: (gather_sequence, 2),
    sequence.sum_over_ranks: (g_f, 1),
    sequence.causal_attention: (causal_attention, 3),
    sequence.gathered_attention: (gathered_attention, 4),
}
ATTENTIONS = (causal_attention, gathered_attention)
OPTIONS = ("dropout_p", "scale", "enable_gqa")


def exchange_sequence(stage: StageGraph, context: LowerContext) -> None:
    """In place: the axis takes the place of its size, options of attention become keywords, its kernel among them."""
    for node in list(stage.graph.nodes):
        if node.op == "call_function" and node.target in BECOMES:
            (function, position), draws = BECOMES[node.target], is_random(node)
            node.update_arg(position, axis_node(stage, context.axes["cp"]))
            node.target = function
            if function is causal_attention:
                node.kwargs = dict(zip(OPTIONS, node.args[position + 1 :], strict=False)) | node.kwargs
                node.args = node.args[: position + 1]
            if function in ATTENTIONS and not draws and context.lowering.options.attention != FLASH:
                node.kwargs = {**node.kwargs, "kernel": context.lowering.options.attention}
