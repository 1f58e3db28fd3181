"""Vocabulary-parallel input embedding and cross-entropy (Megatron-LM paper, section 3).

embedding   rows [start, start + v/tp): ids outside give zeros; the sum over ranks is the lookup (type P)
loss        ℓ = log Σ exp(z) − z[target]: ranks exchange per token max z, then Σ exp(z − max) and z[target] − max,
            three scalars; with label smoothing also Σ z. Padding columns take no part. Gradient: softmax − one-hot
weighted    w[target] · ℓ, and with label smoothing ε also ε/v · Σ w (log Σ exp(z) − z) over the classes
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from passes.ops.axis import AxisHandle, widened
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


def vocabulary_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: AxisHandle,
    vocabulary: int,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
) -> Tensor:
    """logits [n, v/tp] of this rank, target [n] global ids: the loss of ``torch.nn.functional.cross_entropy``.

    ``weight`` [v] of each class is whole on every rank.
    ``vocabulary`` is the number of true classes: columns beyond it are padding. reduction: 0 none, 1 mean, 2 sum.
    Raises RuntimeError for a target that is no class. Of half precision, losses are summed in float32.
    """
    known = (target == ignore_index) | ((target >= 0) & (target < vocabulary))
    torch._assert_async(known.all(), f"a target is not in [0, {vocabulary}), the classes, nor ignored ({ignore_index})")
    losses = _VocabularyCrossEntropy.apply(logits, target, axis, vocabulary, ignore_index, label_smoothing, weight)
    if reduction == 0:
        return losses.to(logits.dtype)
    total = losses.sum()
    valid = target != ignore_index
    count = valid.sum() if weight is None else torch.where(valid, widened(weight)[target * valid], 0.0).sum()
    return (total if reduction == 2 else total / count).to(logits.dtype)


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        axis: AxisHandle,
        vocabulary: int,
        ignore_index: int,
        smoothing: float,
        weight: Tensor | None,
    ) -> Tensor:
        columns = logits.shape[1]
        start = axis.rank * columns
        true_columns = max(0, min(columns, vocabulary - start))
        # the one float32 copy of the logits; what it becomes, step by step, is in place
        probabilities = logits.new_empty(logits.shape, dtype=widened(logits[:0]).dtype)
        z = logits[:, :true_columns]
        top = widened(z.amax(1) if true_columns else torch.full_like(logits[:, 0], -torch.inf))
        top = all_reduce(top, axis, "forward", dist.ReduceOp.MAX, owned=True)
        torch.sub(z, top.unsqueeze(1), out=probabilities[:, :true_columns])
        probabilities[:, true_columns:] = -torch.inf
        mine = (target >= start) & (target < start + true_columns)
        local = (target - start).clamp(0, columns - 1)
        picked = probabilities.gather(1, local.unsqueeze(1)).squeeze(1)
        scalars = [torch.where(mine, picked, 0.0)]
        of_class = None if weight is None else weight.to(probabilities.dtype)
        of_column = None if of_class is None else of_class[start : start + true_columns]
        if smoothing:
            parts = probabilities[:, :true_columns]
            scalars.append(parts.sum(1) if of_column is None else (parts * of_column).sum(1))
        probabilities.exp_()
        scalars.append(probabilities.sum(1))
        sums = all_reduce(torch.stack(scalars), axis, "forward", owned=True)
        log_total = sums[-1].log()
        loss = log_total - sums[0]
        valid = target != ignore_index
        of_target = 1.0 if of_class is None else of_class[target * valid]
        of_all = vocabulary if of_class is None else of_class.sum()
        loss = of_target * loss
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing / vocabulary * (of_all * log_total - sums[1])
        ctx.weights = (of_target, of_all, 1.0 if of_column is None else of_column)
        ctx.save_for_backward(probabilities.div_(sums[-1].unsqueeze(1)), mine & valid, local, valid)
        ctx.facts = (logits.dtype, vocabulary, true_columns, smoothing)
        return torch.where(valid, loss, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gradient, mine, local, valid = ctx.saved_tensors
        dtype, vocabulary, true_columns, smoothing = ctx.facts
        of_target, of_all, of_column = ctx.weights
        if isinstance(of_target, Tensor):
            gradient.mul_(((1 - smoothing) * of_target + smoothing / vocabulary * of_all).unsqueeze(1))
        one_hot = (mine.to(gradient.dtype) * (1 - smoothing) * of_target).unsqueeze(1).neg()
        gradient.scatter_add_(1, local.unsqueeze(1), one_hot)  # in place: a stage's backward runs once
        if smoothing:
            gradient[:, :true_columns] -= smoothing / vocabulary * of_column
        # where, and no product: with every label ignored a mean has the gradient 1/0, and an ignored row still has none
        gradient.mul_(torch.where(valid, grads[0].to(gradient.dtype), 0.0).unsqueeze(1))
        return gradient.to(dtype), None, None, None, None, None, None
