"""Losses as users write them by hand: means over tokens, sequences, positions and classes, weighted and masked."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def mean_loss(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def logsumexp_loss(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    valid = labels != -100
    picked = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return ((logits.logsumexp(-1) - picked) * valid).sum() / valid.sum()


def item_loss(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (labels != -100).sum().item()


def each_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """[batch, length], zero where the label is ignored."""
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def weights_loss(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    """Weights that already hold the count."""
    mask = (labels != -100).to(logits.dtype)
    return (each_loss(logits, labels) * (mask / (mask.sum() + 1e-8))).sum()


def means_loss(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    """A mean divided by the mean of the mask."""
    mask = (labels != -100).to(logits.dtype)
    return (each_loss(logits, labels) * mask).mean() / mask.mean()


def sum_by_size_loss(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    """A sum divided by the number of sequences, as the reduction "batchmean" does."""
    return each_loss(logits, labels).sum() / labels.shape[0]


def inner_size_loss(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    """The number of tokens, as a shape, inside of the sum."""
    return (each_loss(logits, labels) / labels.numel()).sum()


def by_position_loss(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    """A mean over the batch for each position, then a sum; a sum over the batch, then a mean."""
    each = each_loss(logits, labels)
    return each.mean(0).sum() + 0.1 * each.sum(0).mean()


def by_sequence_loss(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    """The mean over each sequence's own tokens, then over the sequences."""
    mask = labels != -100
    return (each_loss(logits, labels).sum(1) / mask.sum(1).clamp(min=1)).mean()


def class_weights_loss(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 2.0, logits.shape[-1], dtype=logits.dtype, device=logits.device)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weights)


def masked_loss(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (each * mask).sum() / mask.sum().clamp(min=1)


def several_losses(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    """Cross-entropy with smoothing, plus a small penalty on the logits' size (a mean over all positions)."""
    main = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    return main + 1e-2 * logits.logsumexp(-1).pow(2).mean()


def z_loss(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    """The normaliser is held near one."""
    valid = labels != -100
    return mean_loss(logits, labels) + 0.01 * (logits.logsumexp(-1).pow(2) * valid).sum() / valid.sum()


def entropy_loss(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    """Sure answers are discouraged, on every token alike."""
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return mean_loss(logits, labels) - 0.1 * entropy.mean()


def balanced_loss(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    """As the load balancing of a router: how often a class is the likeliest, times its mean probability."""
    probs = logits.softmax(-1).flatten(0, 1)
    often = F.one_hot(probs.argmax(-1), probs.shape[-1]).to(probs.dtype).mean(0)
    return mean_loss(logits, labels) + probs.shape[-1] * (often * probs.mean(0)).sum()


def spread_loss(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    """The standard deviation of the logits over all tokens: means under a root, each with a gradient."""
    rows = logits.flatten(0, 1)
    return mean_loss(logits, labels) + (rows.square().mean(0) - rows.mean(0).square()).clamp(min=1e-6).sqrt().sum()


def whitened_loss(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    """A policy gradient: rewards less their mean over their deviation, both of all valid tokens of the batch."""
    valid = (labels != -100).to(logits.dtype)
    rewards = (labels % 7).to(logits.dtype)
    mean = (rewards * valid).sum() / valid.sum()
    variance = ((rewards - mean).square() * valid).sum() / valid.sum()
    return (each_loss(logits, labels) * (rewards - mean) * torch.rsqrt(variance + 1e-8)).sum() / valid.sum()


LOSSES = {loss.__name__.replace("_", "-"): loss for loss in (
    logsumexp_loss, item_loss, weights_loss, means_loss, sum_by_size_loss, inner_size_loss, by_position_loss,
    by_sequence_loss, class_weights_loss, masked_loss, several_losses, z_loss, entropy_loss, balanced_loss,
    spread_loss, whitened_loss,
)}  # fmt: skip
