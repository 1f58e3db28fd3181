"""What calls keep of rows, experts and slots: the dims that count them, each index computed by itself, and zeros.

x[E, C, d] @ W[E, d, h] + bias[E, 1, h]      C stays dim 1, E dim 0: both are batch to all that lies among experts
gate · f(x), where(mask, f(x), 0)            zero where the gate is: neither output nor any gradient changes if the
silu(gate·x·W) · (gate·x·V)                  token does not go to the expert
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from passes.moe.layers import Refusal
from passes.moe.ties import is_grouped, ties
from passes.program.ops.aten import draws, is_pointwise
from passes.program.ops.groups import EXTREMES
from passes.rules.call import operands_of
from passes.rules.rule import Role
from passes.rules.table import rule_of

MIXED = "the result of one slot of one expert depends on others"
OF_ROWS = "the result of one row depends on other rows"
OF_STACKS = "the stack of experts changes its layout"
TRIALS = 4


def dims_of(start: Mapping[fx.Node, int], calls: Collection[fx.Node], refusal: Refusal, why: str) -> dict[fx.Node, int]:
    """The same as ``followed``, of calls that all have such a dim."""
    known = followed(start, calls, refusal, why)
    for call in sorted(calls):
        if call not in known:
            raise refusal(call, why)
    return known


def followed(
    start: Mapping[fx.Node, int], calls: Collection[fx.Node], refusal: Refusal, why: str = MIXED
) -> dict[fx.Node, int]:
    """The dims that count the same as those of ``start``, for all ``calls`` and operands that have one.

    Raises the error of ``refusal`` if a call acts along that dim (``why``), or if two dims of a value count the same.
    """
    known, work = dict(start), list(start)
    while work:
        node = work.pop()
        for call in (n for n in (node, *node.users) if n in calls):
            for other, dim in _beside(call, node, known[node]):
                if other not in known:
                    work.append(other)
                if known.setdefault(other, dim) != dim:
                    raise refusal(call, "two dims of a value count its experts, or its slots")
    for node in sorted(calls):
        if node in known and node.op == "call_function" and not _keeps(node, known):
            raise refusal(node, why)
    return known


def _keeps(node: fx.Node, known: Mapping[fx.Node, int]) -> bool:
    """Whether a call maps the dim of each operand to its own, and each index that it makes is made of that index alone.

    A grouped product has its rows by position, and the ends of the experts' runs move with them.
    """
    read = [(i, n) for i, n in enumerate(operands_of(node)) if n in known]
    if any((node, known[node]) not in _beside(node, n, known[n]) for _, n in read):
        return False
    if is_grouped(node):
        return True
    rule = rule_of(node)
    if rule is None or (draws(node.target) and not is_pointwise(node.target)):
        return False
    return all(factor.role is Role.EACH for i, n in read for factor in rule.along(i, known[n]))


def _beside(call: fx.Node, node: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
    """(value, dim) of ``call`` and its operands that count the same as ``dim`` of ``node``."""
    found = [tie for tie in ties(call) if (node, dim) in tie]
    return [(n, d) for tie in found for n, d in tie if n is not node]


# ---- zeros


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
