"""The zeros of a value that follow from the zeros of an operand, for any other input.

gate · f(x), where(mask, f(x), 0), silu(gate·x·W) · (gate·x·V): zero if the gate is. So a token with a zero gate need
not go to the expert: neither its output nor any gradient changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from passes.program.ops.aten import is_pointwise
from passes.program.ops.groups import EXTREMES
from passes.rules.call import operands_of
from passes.rules.table import rule_of

TRIALS = 4


def stays_zero(node: fx.Node, zero: Collection[fx.Node]) -> bool:
    """Whether a call's result is zero at the zeros of all its operands in ``zero``, for any other input."""
    read = [n for n in node.all_input_nodes if n in zero]
    if not read:
        return False
    if node.target is getitem or node.target in EXTREMES:
        return node.all_input_nodes[0] in zero
    rule, operands = rule_of(node), operands_of(node)
    if any(all(operands[i] in zero for i in together) for together in (rule.linear if rule is not None else ())):
        return True
    return is_pointwise(node.target) and _maps_to_zero(node, zero)


def _maps_to_zero(node: fx.Node, zero: Collection[fx.Node]) -> bool:
    generator = torch.Generator().manual_seed(0)

    def number(n: fx.Node) -> Tensor:
        val = n.meta["val"]
        if n in zero:
            return torch.zeros([1] * val.dim(), dtype=val.dtype)
        drawn = torch.randn([1] * val.dim(), generator=generator) * 8
        return drawn > 0 if val.dtype == torch.bool else drawn.to(val.dtype)

    target: Callable[..., Any] = node.target  # pyright: ignore[reportAssignmentType]
    for _ in range(TRIALS):
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), number)
        made = target(*args, **kwargs)
        if not isinstance(made, Tensor) or bool(made.any()):
            return False
    return True
