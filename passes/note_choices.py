"""Which experts a microbatch asks for is noted where they are chosen: weights that nobody asks for rest in that step.

    ids = topk(probs)[1]; … → ids = topk(probs)[1]; note_choices(load, ids, 8); …

Needs:   a finished graph; what nobody reads is gone, and does not go later.
Leaves:  one more call for each value that chooses among experts that may rest.
"""

from __future__ import annotations

from torch import fx

from passes.base import LowerContext, StageGraph
from passes.exchange_rows import load_node
from passes.ops.load import note_choices as noted


def note_choices(stage: StageGraph, context: LowerContext) -> None:
    starts = {name: asked.start for asked in context.decisions.asked for name in asked.chosen}
    for node in list(stage.graph.nodes):
        origin = node.meta.get("origin")
        if node.op == "call_function" and origin in starts and _is_the_value(node, context):
            load = load_node(stage, context)
            with stage.graph.inserting_after(node):
                call = stage.graph.call_function(noted, (load, node, starts[origin]))
            call.meta.update(node.meta)


def _is_the_value(node: fx.Node, context: LowerContext) -> bool:
    """Not what another pass has put beside it."""
    return node.target == context.decisions.program.node(node.meta["origin"]).target
