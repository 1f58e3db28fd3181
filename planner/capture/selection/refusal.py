"""The refusal of a loop over selected rows: the problem, the user's line, and the accepted form."""

from __future__ import annotations

from torch import fx

from passes.errors import PlanError
from passes.program.source_lines import where_of

SELECTION_FIX = (
    "selected rows (token = torch.where(mask)[0]; x[token] or x[mask]) may pass only through row-wise ops "
    "(linear, activations, norms over features; no statistics over rows, no count of rows), and must then be "
    "written back to their positions: out.index_add_(0, token, y), out[token] += y, out[mask] = y; otherwise "
    "compute all rows, with torch.where"
)


def refused(node: fx.Node, what: str) -> PlanError:
    return PlanError(f"the model cannot be captured: {what}", where=where_of(node), fix=SELECTION_FIX)


def name_of(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default").removesuffix(".Tensor")
