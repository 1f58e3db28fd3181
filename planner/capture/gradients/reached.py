"""The flow of the loss's gradient: weights that none reaches are treated as frozen.

    torch.no_grad(): y = tower(x)          h = bottom(x).detach()          self.spare, which nothing reads

Their weights may ask for a gradient; one process has None for them, and its optimizer does not update them.

Leaves:  ``meta["grad"]`` on values that a gradient of the loss reaches, and on no others.
"""

from __future__ import annotations

from torch import fx

from passes.program.program import Program
from passes.program.walks import operands, walk


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
