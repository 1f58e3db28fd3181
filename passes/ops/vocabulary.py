"""Vocabulary-parallel input embedding and cross-entropy (Megatron-LM paper, section 3).

embedding   rows [start, start + v/tp): ids outside give zeros; the sum over ranks is the lookup (type P)
loss        ℓ = log Σ exp(z) − z[target]: ranks exchange per token max z, then Σ exp(z − max) and z[target] − max,
            three scalars; with label smoothing also Σ z. Padding columns take no part. Gradient: softmax − one-hot
weighted    w[target] · ℓ, and with label smoothing ε also ε/v · Σ w (log Σ exp(z) − z) over the classes
in place    z, then exp(z − max), then the gradient of z lie in one memory: of a head, the largest that a rank has
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from passes.ops.axis import ALONE, AxisHandle, own_part, widened
from passes.ops.collectives import all_reduce

Tensor = torch.Tensor


def vocabulary_embedding(
    weight: Tensor, ids: Tensor, axis: AxisHandle, vocabulary: int, padding_idx: int = -1
) -> Tensor:
    """weight [v/tp, h], ids [..]: this rank's part (P) of the lookup [.., h]. Row ``padding_idx`` gets no gradient.

    ``vocabulary`` is the number of true rows. Raises RuntimeError for an id outside of it: no rank would find it.
    """
    known = (ids >= 0) & (ids < vocabulary)
    torch._assert_async(known.all(), f"an id is not in [0, {vocabulary}), the rows of the embedding")
    rows = weight.shape[0]
    local = ids - axis.rank * rows
    outside = (local < 0) | (local >= rows)
    padding = padding_idx - axis.rank * rows
    found = F.embedding(local.masked_fill(outside, 0), weight, padding if 0 <= padding < rows else None)
    return found.masked_fill(outside.unsqueeze(-1), 0.0)


def cross_entropy_in_place(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """logits [n, v] over all classes: ``vocabulary_cross_entropy`` of one rank, which exchanges nothing.

    torch's own makes three more tensors as large as the logits, one of them for the gradient that it then copies.
    """
    options = (reduction, ignore_index, label_smoothing, weight)
    return vocabulary_cross_entropy(logits, target, None, logits.shape[1], *options, in_place=True)


def vocabulary_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: AxisHandle | None,
    vocabulary: int,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    in_place: bool = False,
) -> Tensor:
    """logits [n, v/tp] of this rank, target [n] global ids: the loss of ``torch.nn.functional.cross_entropy``.

    ``weight`` [v] of each class is replicated on every rank. ``axis``: None if this rank has all classes.
    ``vocabulary`` is the number of true classes: columns beyond it are padding. reduction: 0 none, 1 mean, 2 sum.
    ``in_place``: the logits, in float32 or more, may be overwritten: they are not read again.
    Raises RuntimeError for a target that is no class. Of half precision, losses are summed in float32.
    """
    known = (target == ignore_index) | ((target >= 0) & (target < vocabulary))
    torch._assert_async(known.all(), f"a target is not in [0, {vocabulary}), the classes, nor ignored ({ignore_index})")
    options = _Options(vocabulary, ignore_index, label_smoothing, in_place)
    losses = _VocabularyCrossEntropy.apply(logits, target, axis, weight, options)
    if reduction == 0:
        return losses.to(logits.dtype)
    total = losses.sum()
    valid = target != ignore_index
    count = valid.sum() if weight is None else torch.where(valid, widened(weight)[target * valid], 0.0).sum()
    return (total if reduction == 2 else total / count).to(logits.dtype)


class _Options(NamedTuple):
    """As of ``vocabulary_cross_entropy``."""

    vocabulary: int
    ignore_index: int
    smoothing: float
    in_place: bool


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, axis: AxisHandle | None, weight: Tensor | None, options: _Options
    ) -> Tensor:
        vocabulary, ignore_index, smoothing, in_place = options
        columns = logits.shape[1]
        start, true_columns = own_part(columns, axis, vocabulary)
        # the one float32 copy of the logits, or the logits themselves; all steps run in place
        parts = logits.detach() if in_place else logits.new_empty(logits.shape, dtype=widened(logits[:0]).dtype)
        z = logits.detach()[:, :true_columns]
        top = widened(z.amax(1) if true_columns else torch.full_like(logits[:, 0], -torch.inf))
        top = all_reduce(top, axis or ALONE, "forward", dist.ReduceOp.MAX, owned=True)
        torch.sub(z, top.unsqueeze(1), out=parts[:, :true_columns])
        parts[:, true_columns:].fill_(-torch.inf)
        mine = (target >= start) & (target < start + true_columns)
        local = (target - start).clamp(0, columns - 1)
        picked = parts.gather(1, local.unsqueeze(1)).squeeze(1)
        scalars = [torch.where(mine, picked, 0.0)]
        of_class = None if weight is None else weight.to(parts.dtype)
        of_column = None if of_class is None else of_class[start : start + true_columns]
        if smoothing:
            true = parts[:, :true_columns]
            scalars.append(true.sum(1) if of_column is None else (true * of_column).sum(1))
        parts.exp_()
        scalars.append(parts.sum(1))
        sums = all_reduce(torch.stack(scalars), axis or ALONE, "forward", owned=True)
        log_total = sums[-1].log()
        loss = log_total - sums[0]
        valid = target != ignore_index
        of_target = 1.0 if of_class is None else of_class[target * valid]
        of_all = vocabulary if of_class is None else of_class.sum()
        loss = of_target * loss
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing / vocabulary * (of_all * log_total - sums[1])
        ctx.weights = (of_target, of_all, 1.0 if of_column is None else of_column)
        ctx.save_for_backward(parts, sums[-1].clone(), mine & valid, local, valid)  # without the other sums
        ctx.facts = (logits.dtype, vocabulary, true_columns, smoothing)
        return torch.where(valid, loss, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gradient, total, mine, local, valid = ctx.saved_tensors
        dtype, vocabulary, true_columns, smoothing = ctx.facts
        of_target, of_all, of_column = ctx.weights
        # torch.where instead of a product: with every label ignored a mean has the gradient 1/0, and an ignored row
        # still has none
        pulled = torch.where(valid, grads[0].to(gradient.dtype), 0.0)
        of_row = (1 - smoothing) * of_target + smoothing / vocabulary * of_all
        gradient.mul_((pulled * of_row / total).unsqueeze(1))  # in place: a stage's backward runs once
        one_hot = mine.to(gradient.dtype) * (1 - smoothing) * of_target * pulled
        gradient.scatter_add_(1, local.unsqueeze(1), one_hot.unsqueeze(1).neg())
        if smoothing:
            gradient[:, :true_columns] -= pulled.unsqueeze(1) * (smoothing / vocabulary * of_column)
        return gradient.to(dtype), None, None, None, None
