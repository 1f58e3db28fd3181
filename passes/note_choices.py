"""Count the experts that each microbatch chooses: weights that no token chooses are not updated in that step.

    ids = topk(probs)[1]; … → ids = topk(probs)[1]; note_choices(load, ids, 8); …

Needs:   a finished graph; unread nodes are gone, and none is removed later.
Leaves:  one more call for each value that chooses among experts that may rest.
"""

from __future__ import annotations

from torch import fx

from passes.base import LowerContext, StageGraph
from passes.exchange_rows import load_node
from passes.ops.load import note_choices as noted


def note_choices(stage: StageGraph, context: LowerContext) -> None:
    starts = {name: asked.start for asked in context.lowering.asked for name in asked.chosen}
    for node in list(stage.graph.nodes):
        origin = node.meta.get("origin")
        if node.op == "call_function" and origin in starts and _is_the_value(node, context):
            load = load_node(stage, context)
            with stage.graph.inserting_after(node):
                call = stage.graph.call_function(noted, (load, node, starts[origin]))
            call.meta.update(node.meta)


def _is_the_value(node: fx.Node, context: LowerContext) -> bool:
    """Whether the node is the captured value itself, not one that a pass inserted."""
    return node.target == context.lowering.program.node(node.meta["origin"]).target
