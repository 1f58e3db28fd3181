"""Where a gradient of the loss flows: weights that none reaches are as frozen ones.

    torch.no_grad(): y = tower(x)          h = bottom(x).detach()          self.spare, which nothing reads

Their weights may ask for a gradient; one process has None for them, and its optimizer leaves them as they are.

Leaves:  ``meta["grad"]`` on what a gradient of the loss reaches, and on nothing else.
"""

from __future__ import annotations

from torch import fx

from planner.graph.program import Program
from planner.graph.walks import operands, walk


def keep_what_is_reached(program: Program) -> None:
    """Take ``meta["grad"]`` from all that no gradient reaches; the weights among that become ``program.untrained``."""
    reached = set(walk([program.node(program.loss)], operands, into=_carries))
    for node in program.graph.graph.nodes:
        if _carries(node) and node not in reached:
            node.meta["grad"] = False
            if node.name in program.parameters:
                program.untrained.append(program.parameters[node.name])


def _carries(node: fx.Node) -> bool:
    return bool(node.meta.get("grad"))
