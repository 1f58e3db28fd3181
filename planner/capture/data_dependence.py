"""Refuse code that depends on the values of tensors: a plan holds for every batch, so shapes and paths must be known
now.

``x.item()`` of a tensor is carried as the tensor itself, so a loss may divide by it; everything that computes with the
number in Python, or cuts by it, is refused with the user's line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from passes.errors import PlanError
from passes.program.source_lines import where_of

FIX = (
    "control flow and shapes may depend on shapes and settings, not on the values of tensors: replace the branch "
    "by torch.where, a mask or a flag (x[mask] and nonzero() are supported only to select rows that are written "
    "back to their positions)"
)

NUMBER_OF_DATA = "a branch, a shape or a number in Python depends on the values of tensors (data-dependent)"


def depends_on_data(error: PlanError) -> bool:
    """Whether a refusal is of a branch, a shape or a number that depends on the values of tensors."""
    return error.fix == FIX or "data-dependent" in error.what or "read from a tensor" in error.what


def refuse_dynamic_shapes(module: fx.GraphModule) -> None:
    """Raise PlanError at the first tensor with a size that is known only at run time (as of x[mask])."""
    for node in _calls(module):
        if any(not isinstance(size, int) for value in _tensors(node.meta.get("val")) for size in value.shape):
            raise shape_of_data(node)


def shape_of_data(node: fx.Node) -> PlanError:
    """The refusal of a call with a shape that depends on data."""
    return PlanError(
        f"the model cannot be captured: the output shape of {_name(node)} depends on data",
        where=where_of(node),
        fix=FIX,
    )


def refuse_numbers_from_tensors(module: fx.GraphModule) -> None:
    """Raise PlanError if Python computes with a number that was read out of a tensor."""
    for node in _calls(module):
        if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise PlanError(
                "the model cannot be captured: Python computes with a number read from a tensor",
                where=where_of(node),
                fix="compute with the tensor itself, without .item() or int()",
            )


def _calls(module: fx.GraphModule) -> Iterator[fx.Node]:
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            yield from (n for n in inner.graph.nodes if n.op == "call_function")


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _name(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default").removesuffix(".Tensor")
