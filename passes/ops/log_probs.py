"""Log-probability of each label with a gradient, on logits that may be sharded over the vocabulary.

    log P(t) = z[t] − log Σ exp z          ∂ log P(t) / ∂z[v] = [v = t] − exp(z[v] − log Σ exp z)

The forward exchanges what a score does: max z, then the target's logit and Σ exp. The backward exchanges nothing: each
rank computes the gradient of its own classes. Logits are never gathered, and no probabilities are saved.
"""

from __future__ import annotations

from typing import Any

import torch

from passes.ops.axis import AxisHandle, widened
from passes.ops.scores import at_labels, log_probabilities, looked_up, own_classes, rows_of

Tensor = torch.Tensor


def log_probs_of_targets(
    logits: Tensor,
    target: Tensor,
    places: Tensor,
    labels: Tensor,
    axis: AxisHandle | None,
    class_dim: int,
    num_classes: int,
    ignored: int,
) -> Tensor:
    """[*labels] (float64): log P at the label that each target is; zero, without a gradient, for a label that is no
    target, or ignored.

    logits [.., v/tp, ..] of this rank, or complete without an ``axis``; target, places [..] or with a class dim of one.
    """
    return _LogProbs.apply(logits, target, places, labels, axis, class_dim, num_classes, ignored)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        places: Tensor,
        labels: Tensor,
        axis: AxisHandle | None,
        class_dim: int,
        num_classes: int,
        ignored: int,
    ) -> Tensor:
        t, at, scored = looked_up(target, places, labels, num_classes, ignored)
        log_probability, log_total = log_probabilities(rows_of(logits, class_dim), t, axis, num_classes)
        ctx.save_for_backward(logits, t, at, scored, log_total)
        ctx.axis, ctx.class_dim, ctx.num_classes = axis, class_dim, num_classes
        return at_labels(log_probability.unsqueeze(0), at, scored, labels)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, t, at, scored, log_total = ctx.saved_tensors
        rows = rows_of(logits, ctx.class_dim)
        start, true_columns = own_classes(rows.shape[1], ctx.axis, ctx.num_classes)
        each = torch.where(scored, grads[0].reshape(-1)[at.clamp(min=0)], 0.0).to(log_total.dtype)
        found = (widened(rows) - log_total.unsqueeze(1)).exp_().mul_(-each.unsqueeze(1))
        found[:, true_columns:] = 0.0
        mine = (t >= start) & (t < start + true_columns)
        column = (t - start).clamp(0, rows.shape[1] - 1).unsqueeze(1)
        found.scatter_add_(1, column, torch.where(mine, each, 0.0).unsqueeze(1))
        moved = logits.movedim(ctx.class_dim, -1).shape
        gradient = found.to(logits.dtype).reshape(moved).movedim(-1, ctx.class_dim)
        return gradient, *[None] * 7
