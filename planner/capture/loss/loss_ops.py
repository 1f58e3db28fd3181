"""Tables of the ops that losses are made of, and how to read their arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from planner.capture.loss.counts import AVERAGES, SUMS
from planner.capture.loss.kinds import SHARE, Kind
from planner.graph.ops.aten import arguments, reduced_dims

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
PRODUCTS = {aten.matmul.default, aten.mm.default, aten.bmm.default, aten.linear.default, aten.einsum.default}
CHOICES = {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Scalar}
ALONG_LAST = {aten.gather.default, aten.softmax.int, aten.log_softmax.int}


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
    if node.target is aten.einsum.default:
        words, _, result = str(node.args[0]).partition("->")
        operands: Any = node.args[1]
        return words.split(",")[operands.index(operand)][dim] not in result
    ndim = operand.meta["val"].dim()
    if operand is node.args[0] or node.target is aten.linear.default:
        return dim == ndim - 1
    return dim == max(0, ndim - 2)


def one_dim_kept(node: fx.Node, source: fx.Node, dim: int) -> int | None:
    """The place of ``dim`` of ``source`` in the result, by the op; None if that is not known."""
    before, after = source.meta["val"].shape, node.meta["val"].shape
    if node.target is aten.reshape.default:
        outer = math.prod(before[:dim])
        places = [j for j in range(len(after)) if math.prod(after[:j]) == outer and after[j] % before[dim] == 0]
        return places[-1] if places else None
    if node.target is aten.permute.default:
        return list(node.args[1]).index(dim)  # pyright: ignore
    if node.target in CROSS_ENTROPIES | ALONG_LAST:
        return dim if dim < max(1, len(before) - 1) else None
    if node.target in SUMS | AVERAGES | {aten.logsumexp.default, aten.amax.default}:
        gone = sum(d < dim for d in reduced_dims(node)) if len(after) < len(before) else 0
        return None if dim in reduced_dims(node) else dim - gone
    if node.target is aten.linear.default:
        return dim if dim < len(before) - 1 else None
    moved = dim + len(after) - len(before)
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in CASTS:
        return moved if after[moved] == before[dim] else None
    return None
