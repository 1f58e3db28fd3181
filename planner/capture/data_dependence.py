"""Refuse code that depends on the values of tensors: a plan holds for every batch, so shapes and paths must be known
now.

``x.item()`` of a tensor is carried as the tensor itself, so a loss may divide by it; everything that computes with the
number in Python, or cuts by it, is refused with the user's line.
"""

from collections.abc import Iterator

import torch
from torch import fx

from passes.errors import PlanError, Where
from passes.program.source_lines import where_of
from planner.capture.model.exchange import tensors_in

FIX = (
    "control flow and shapes may depend on shapes and settings, not on the values of tensors: replace the branch "
    "by torch.where, a mask or a flag (x[mask] and nonzero() are supported only to select rows that are added up, "
    "or written back to their positions)"
)

NUMBER_OF_DATA = "a branch, a shape or a number in Python depends on the values of tensors (data-dependent)"
SELECTION_FIX = (
    "selected rows (token = torch.where(mask)[0]; x[token] or x[mask]) may pass only through row-wise ops "
    "(linear, activations, norms over features; no statistics over rows), and must then be added up (y.sum(), "
    "y.mean(), a loss, a sum / y.shape[0]) or written back to their positions: out.index_add_(0, token, y), "
    "out[token] += y, out[mask] = y; otherwise compute all rows, with torch.where"
)


def not_captured(what: str, where: Where, fix: str = FIX) -> PlanError:
    """Return the refusal of a forward that export cannot follow."""
    return PlanError(f"the model cannot be captured: {what}", where=where, fix=fix)


def depends_on_data(error: PlanError) -> bool:
    """Return whether a refusal is of a branch, a shape or a number that depends on the values of tensors."""
    return error.fix == FIX or "data-dependent" in error.what or "read from a tensor" in error.what


def refuse_dynamic_shapes(module: fx.GraphModule) -> None:
    """Raise PlanError at the first tensor with a size that is known only at run time (as of x[mask])."""
    for node in calls_in(module):
        if any(not isinstance(size, int) for value in tensors_in(node.meta.get("val")) for size in value.shape):
            raise shape_of_data(node)


def shape_of_data(node: fx.Node) -> PlanError:
    """Return the refusal of a call with a shape that depends on data."""
    return not_captured(f"the output shape of {name_of(node)} depends on data", where_of(node))


def refuse_numbers_from_tensors(module: fx.GraphModule) -> None:
    """Raise PlanError if Python computes with a number that was read from a tensor."""
    for node in calls_in(module):
        if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            fix = "compute with the tensor itself, without .item() or int()"
            raise not_captured("Python computes with a number read from a tensor", where_of(node), fix)


def calls_in(module: fx.GraphModule) -> Iterator[fx.Node]:
    return (node for node in module.graph.nodes if node.op == "call_function")


def refused(node: fx.Node, what: str) -> PlanError:
    return not_captured(what, where_of(node), SELECTION_FIX)


def name_of(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default").removesuffix(".Tensor")
