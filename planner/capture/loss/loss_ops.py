"""Tables of the ops that losses are made of, and how to read their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from planner.capture.loss.kinds import SHARE, Kind
from planner.graph.ops.aten import arguments, shape_of
from planner.rules.call import operands_of
from planner.rules.rule import RESULT, Factor, Role
from planner.rules.table import rule_of

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
share = Kind(SHARE)

CROSS_ENTROPIES = {aten.cross_entropy_loss.default, aten.nll_loss_nd.default}
OF_ROWS = {aten.cosine_embedding_loss.default, aten.triplet_margin_loss.default}  # of full rows, along dim 0
OVER_ROWS = {
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.binary_cross_entropy.default,
    aten.kl_div.default,
    aten.soft_margin_loss.default,
    aten.margin_ranking_loss.default,
    aten.hinge_embedding_loss.default,
    *OF_ROWS,
}
DIVISIONS = {aten.div.Tensor, aten.div.Scalar, aten.true_divide.Tensor, aten.divide.Tensor}
SCALED = DIVISIONS | {aten.mul.Tensor, aten.mul.Scalar, aten.multiply.Tensor}
ADDED = {aten.add.Tensor, aten.sub.Tensor, aten.subtract.Tensor, aten.rsub.Scalar}
CASTS = {aten.to.dtype, aten.clone.default, aten.contiguous.default, aten.neg.default}
LAYOUT = CASTS | {
    aten.reshape.default,
    aten.permute.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.split_with_sizes.default,
}
CHOICES = {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Scalar}


def reduction_of(node: fx.Node) -> int:
    """The reduction code of a loss op."""
    return int(arguments(node).get("reduction", MEAN))


def counts_inputs(node: fx.Node, from_inputs: Mapping[str, bool]) -> bool:
    """Whether a cross-entropy's denominator can be counted before the forward; true if there is none."""
    given = arguments(node)
    target, weight = given["target"], given.get("weight")
    if reduction_of(node) != MEAN or target.meta["val"].is_floating_point():
        return True
    return bool(from_inputs.get(target.name)) and (weight is None or weight.name in from_inputs)


def selects(node: fx.Node) -> tuple[list[fx.Node], fx.Node]:
    """The values among which `where` or `masked_fill` chooses, and the condition."""
    args: Any = node.args
    condition = args[1] if node.target is aten.masked_fill.Scalar else args[0]
    return [a for a in args if isinstance(a, fx.Node) and a is not condition], condition


def contracts(node: fx.Node, operand: fx.Node, dim: int) -> bool:
    """Whether a product sums over ``dim`` of ``operand``."""
    factor = _factor(node, operand, dim)
    return factor is not None and factor.role is not Role.EACH and factor.at(RESULT) is None


def one_dim_kept(node: fx.Node, source: fx.Node, dim: int) -> int | None:
    """The place of ``dim`` of ``source`` in the result, of a merged dim the outer part; None if that is not known."""
    if node.target in CROSS_ENTROPIES:
        return dim if dim < max(1, source.meta["val"].dim() - 1) else None
    factor = _factor(node, source, dim)
    place = factor.at(RESULT) if factor is not None and factor.role is Role.EACH else None
    is_outer = place is not None and factor is not None and place.inner * factor.size == shape_of(node)[place.dim]
    return place.dim if place is not None and is_outer else None


def _factor(node: fx.Node, operand: fx.Node, dim: int) -> Factor | None:
    """The one that is all of a dim of an operand."""
    rule = rule_of(node)
    return None if rule is None else rule.sole(operands_of(node).index(operand), dim)
