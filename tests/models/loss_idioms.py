"""Ways to write one loss: what a divisor is made of, and loops, chunks and stacks over the batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tools.loss_shares import IGNORED, Loss, rows


def arange_mask(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    mask = (torch.arange(labels.shape[1]) < 4).expand(labels.shape)
    return (rows(logits, labels) * mask).sum() / mask.sum()


def filled_mask(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    mask = torch.zeros(labels.shape)
    mask[:, :3] = 1
    return (rows(logits, labels) * mask).sum() / mask.sum()


def cat_mask(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    size = labels.shape[0]
    mask = torch.cat([torch.zeros(size, 2), torch.ones(size, labels.shape[1] - 2)], 1)
    return (rows(logits, labels) * mask).sum() / mask.sum()


def new_full_mask(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    mask = logits.new_full(labels.shape, 0.5)
    return (rows(logits, labels) * mask).sum() / mask.sum()


def ones_like_mask(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    each = rows(logits, labels)
    return each.sum() / torch.ones_like(each).sum()


def count_times_size(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    mask = torch.arange(labels.shape[1]) < 4
    return (rows(logits, labels) * mask).sum() / (mask.sum() * labels.shape[0])


def both_masks(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    mask = (torch.arange(labels.shape[1]) > 0) & (labels != IGNORED)
    return (rows(logits, labels) * mask).sum() / mask.sum().clamp(min=1)


def view_mean_sum(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    size = labels.shape[0]
    return rows(logits, labels).flatten().view(size, -1).mean(1).sum() / size


def ones_product(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    per_sequence = rows(logits, labels).mean(1)
    return torch.ones(len(labels), dtype=logits.dtype) @ per_sequence / len(labels)


def weights_product(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    size = len(labels)
    return torch.full((size,), 1 / size, dtype=logits.dtype).dot(rows(logits, labels).sum(1))


def einsum_of_mask(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    mask = (labels != IGNORED).to(logits.dtype)
    return torch.einsum("bt,bt->", rows(logits, labels), mask) / mask.sum()


def normalised_weights(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    weights = torch.ones(labels.shape, dtype=logits.dtype)
    return (rows(logits, labels) * (weights / weights.sum())).sum()


def position_weights(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    weights = torch.linspace(1, 2, labels.shape[1], dtype=logits.dtype)
    return (rows(logits, labels) * weights).sum() / (weights.sum() * len(labels))


def weighted_by_size(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    weights = torch.linspace(1, 2, labels.shape[1], dtype=logits.dtype) / len(labels)
    return (rows(logits, labels) * weights).sum()


def penalty_each(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    penalty = weight.pow(2).mean() * torch.ones(len(labels), dtype=logits.dtype)
    return (rows(logits, labels).mean(1) + penalty).sum() / len(labels)


def guarded(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    count = (labels != IGNORED).sum()
    return torch.where(count > 0, rows(logits, labels).sum() / count, 0.0)


def stacked_terms(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    each = rows(logits, labels)
    terms = torch.stack([each.mean(), logits.pow(2).mean()])
    return terms @ torch.tensor([1.0, 0.1], dtype=logits.dtype)


def gathered(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    mask = labels != IGNORED
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    return -(picked * mask).sum() / mask.sum()


def shifted(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    count = labels.shape[0] * (labels.shape[1] - 1)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / count


# ---- counts that read other counts


def weights_normed_then_masked(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    weights, mask = (1 + labels % 3).to(logits.dtype), labels != IGNORED
    weights = weights / weights.sum()
    return (rows(logits, labels) * weights * mask).sum() / (weights * mask).sum()


def mean_that_nothing_else_reads(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    values = (labels % 5).to(logits.dtype)
    return rows(logits, labels).sum() / (values - values.mean()).square().sum()


def whitened_sequences(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    """Three levels: a mean, a variance about it, and the sum of all sizes after it."""
    rewards = (labels % 5).to(logits.dtype).sum(1)
    rewards = rewards - rewards.mean()
    rewards = rewards / rewards.square().mean().sqrt()
    return (rows(logits, labels).sum(1) * rewards).sum() / rewards.abs().sum()


def rewards_by_their_deviation(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    rewards = (labels % 5).to(logits.dtype)
    return (rows(logits, labels) * (rewards - rewards.mean()) / (rewards.std() + 1e-8)).mean()


def returns_by_position(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    """Without Bessel's correction, of each position over the batch, and of a whole sequence's return."""
    rewards = (labels % 5).to(logits.dtype)
    variance, mean = torch.var_mean(rewards, 0, unbiased=False, keepdim=True)
    advantages = (rewards - mean) / (variance + 0.1) + rewards.sum(1).var().sqrt()
    return (rows(logits, labels) * advantages).mean()


def class_weights_of_counts(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    """Rare classes of the batch weigh more, and the mean is over these weights."""
    often = F.one_hot(labels.clamp(min=0), logits.shape[-1]).to(logits.dtype).sum((0, 1))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=1 / (1 + often))


def weights_of_added_counts(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    """Each label weighs less the more often it stands in the batch, or near it."""
    classes, valid = labels.clamp(min=0).flatten(), (labels != IGNORED).to(logits.dtype).flatten()
    often = logits.new_zeros(logits.shape[-1]).scatter_add(0, classes, valid)
    near = torch.zeros(2, logits.shape[-1] // 2).to(logits.dtype).flatten().index_add(0, classes // 2, valid)
    weights = valid / (1 + often[classes] + near[classes // 2])
    return (rows(logits, labels).flatten() * weights).sum() / weights.sum()


# ---- loops, chunks and stacks


def python_loop(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    return sum(F.cross_entropy(x, y) for x, y in zip(logits, labels, strict=True)) / len(labels)


def loop_into_zero(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    total = torch.zeros((), dtype=logits.dtype)
    for i in range(labels.shape[0]):
        total = total + F.cross_entropy(logits[i], labels[i]) / labels.shape[0]
    return total


def loop_in_place(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    total = logits.new_zeros(())
    for i in range(labels.shape[0]):
        total += F.cross_entropy(logits[i], labels[i])
    return total / labels.size(0)


def loop_without_start(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    total = F.cross_entropy(logits[0], labels[0])
    for i in range(1, labels.shape[0]):
        total = total + F.cross_entropy(logits[i], labels[i])
    return total


def loop_with_counts(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    total, count = 0, 0
    for x, y in zip(logits, labels, strict=True):
        total = total + F.cross_entropy(x, y, reduction="sum")
        count = count + (y != IGNORED).sum()
    return total / count


def loop_of_powers(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    """What is not linear within a sequence is a sum over sequences all the same."""
    return sum(F.cross_entropy(x, y).exp() for x, y in zip(logits, labels, strict=True)) / len(labels)


def stacked_rows(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    each = torch.stack([F.cross_entropy(x, y, reduction="none") for x, y in zip(logits, labels, strict=True)])
    mask = labels != IGNORED
    return ((each * mask).sum(1) / mask.sum(1)).mean()


def chunks_of_rows(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    pieces = zip(logits.flatten(0, 1).chunk(2), labels.flatten().chunk(2), strict=True)
    return sum(F.cross_entropy(x, y, reduction="sum") for x, y in pieces) / (labels != IGNORED).sum()


def pieces_of_rows(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    pieces = zip(logits.flatten(0, 1).split(4), labels.flatten().split(4), strict=True)
    return sum(F.cross_entropy(x, y, reduction="sum") for x, y in pieces) / (labels != IGNORED).sum()


def rows_joined(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    """Of one sequence a concatenation of one piece, which ends with a sum."""
    changed = torch.vstack([piece + piece.mean((1, 2), keepdim=True) for piece in logits.split(1)])
    return changed.pow(2).sum()


def pieces_by_slices(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    flat, targets, total = logits.flatten(0, 1), labels.flatten(), 0.0
    for i in range(0, len(targets), 5):
        total = total + F.cross_entropy(flat[i : i + 5], targets[i : i + 5], reduction="sum")
    return total / labels.numel()


def pieces_stacked(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    pieces = zip(logits.flatten(0, 1).chunk(3), labels.flatten().chunk(3), strict=True)
    sums = torch.stack([F.cross_entropy(x, y, reduction="sum") for x, y in pieces])
    return sums.sum() / (labels != IGNORED).sum()


def pieces_joined(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    pieces = zip(logits.flatten(0, 1).split(4), labels.flatten().split(4), strict=True)
    return torch.cat([F.cross_entropy(x, y, reduction="none") for x, y in pieces]).mean()


def chunks_of_length(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    pieces = zip(logits.chunk(3, 1), labels.chunk(3, 1), strict=True)
    total = sum(F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum") for x, y in pieces)
    return total / (labels != IGNORED).sum()


def chunks_of_length_joined(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    pieces = zip(logits.chunk(3, 1), labels.chunk(3, 1), strict=True)
    each = torch.cat([F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none") for x, y in pieces])
    return each.sum() / (labels != IGNORED).sum()


def lengths_first(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    each = F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), labels.T.flatten(), reduction="none")
    return each.view(labels.shape[1], -1).mean(0).sum() / len(labels)


def pair_losses(logits: Tensor, labels: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    """Of each sequence the log-probability under two policies, as DPO and ORPO join and split them."""
    joined, both = torch.cat([logits, logits.flip(-1)]), torch.cat([labels, labels]).clamp(min=0)
    each = joined.log_softmax(-1).gather(-1, both.unsqueeze(-1)).squeeze(-1).mean(-1) - 0.01
    return joined[: len(labels)], each


def preferences(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    chosen, rejected = pair_losses(logits, labels, _)[1].chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def odds_ratio(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    first, each = pair_losses(logits, labels, _)
    chosen, rejected = each[: len(labels)], each[len(labels) :]
    odds = chosen - rejected - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return F.cross_entropy(first.flatten(0, 1), labels.flatten()) - 0.1 * F.logsigmoid(odds).mean()


def cosine_embedding(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    same = torch.where(labels[:, 0] > 3, 1, -1)
    return F.cosine_embedding_loss(logits.mean(1), logits.flip(-1).mean(1), same)


def margin_ranking(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    first, second = logits.sum((1, 2)), logits.pow(2).sum((1, 2))
    return F.margin_ranking_loss(first, second, torch.ones(len(labels)), margin=0.5)


def margins(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Of ids in 0 … 7; some of the labels are out of that range."""
    labels, of_classes = labels.clamp(min=0), weight.detach().abs().sum(1)
    first = F.multi_margin_loss(logits[:, 0], labels[:, 0], p=2, weight=of_classes, reduction="sum")
    first = first + F.multi_margin_loss(logits[:, 2], labels[:, 2], margin=0.3)
    several = torch.cat([labels[:, 1:3], labels.new_full((len(labels), 1), -1), labels[:, 1:6]], 1)
    return first + F.multilabel_margin_loss(logits[:, 1], several, reduction="sum")


def own_targets(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """The same target for each sequence."""
    held = torch.tensor([3]).expand(len(labels))
    near = F.mse_loss(logits.mean(1), weight.sum(1).expand(len(labels), -1), reduction="sum")
    return F.cross_entropy(logits[:, 0], held, reduction="sum") + near


def ranges_of_rows(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Chunks of so many tokens, whatever sequences they are of."""
    x, y = logits.flatten(0, 1), labels.flatten()
    losses = [F.cross_entropy(x[i : i + 4], y[i : i + 4], reduction="sum") for i in range(0, len(x), 4)]
    return torch.stack(losses).sum() / (y != IGNORED).sum()


SHAPES: dict[str, Loss] = {f.__name__: f for f in (
    arange_mask, filled_mask, cat_mask, new_full_mask, ones_like_mask, count_times_size, both_masks, view_mean_sum,
    ones_product, weights_product, einsum_of_mask, normalised_weights, position_weights, weighted_by_size,
    penalty_each, guarded, stacked_terms, gathered, shifted, preferences, odds_ratio, cosine_embedding,
    margin_ranking, ranges_of_rows, margins, own_targets, weights_normed_then_masked, mean_that_nothing_else_reads,
    whitened_sequences, rewards_by_their_deviation, returns_by_position, class_weights_of_counts,
    weights_of_added_counts,
)}  # fmt: skip
SHAPES |= {
    "ones_like_labels": lambda logits, labels, _: rows(logits, labels).sum() / torch.ones_like(labels).sum(),
    "zeros_plus_one": lambda logits, labels, _: rows(logits, labels).sum() / (torch.zeros_like(labels) + 1).sum(),
    "tensor_of_number": lambda logits, labels, _: rows(logits, labels).sum() / torch.tensor(labels.numel()),
    "float_tensor": lambda logits, labels, _: rows(logits, labels).sum() * torch.tensor(1.0 / labels.shape[0]),
    "full_of_ones": lambda logits, labels, _: rows(logits, labels).sum() / torch.full((labels.shape[0],), 1.0).sum(),
    "minus_ignored": lambda logits, labels, _: (
        rows(logits, labels).sum() / (labels.numel() - (labels == IGNORED).sum())
    ),
    "size_less_one": lambda logits, labels, _: rows(logits, labels).sum() / (labels.shape[0] * labels.shape[1] - 1),
    "nested_means": lambda logits, labels, _: rows(logits, labels).mean(1).mean(0),
    "mean_over_batch_first": lambda logits, labels, _: rows(logits, labels).mean(0).mean(),
    "transposed_means": lambda logits, labels, _: rows(logits, labels).T.sum(1).div(len(labels)).mean(),
    "cumulated_size": lambda logits, labels, _: rows(logits, labels).sum() / torch.ones(len(labels)).cumsum(0)[-1],
    "penalty_by_size": lambda logits, labels, weight: (
        rows(logits, labels).sum() / len(labels) + 0.3 * weight.pow(2).mean()
    ),
    "counts_by_position": lambda logits, labels, _: (
        rows(logits, labels).sum(0) / (labels >= 0).sum(0).clamp(min=1)
    ).mean(),
    "triplets": lambda logits, labels, _: F.triplet_margin_loss(
        logits.mean(1), logits.flip(-1).mean(1), logits.pow(2).mean(1)
    ),
    "hinge_embedding": lambda logits, labels, _: F.hinge_embedding_loss(
        logits.sum((1, 2)), torch.where(labels[:, 0] > 3, 1, -1)
    ),
    "two_less_cosine": lambda logits, labels, _: (
        2 - 2 * F.cosine_similarity(logits.mean(1), logits.flip(-1).mean(1), dim=-1).mean()
    ),
}
LOOPS: dict[str, Loss] = {f.__name__: f for f in (
    python_loop, loop_into_zero, loop_in_place, loop_without_start, loop_with_counts, loop_of_powers, stacked_rows,
    chunks_of_rows, pieces_of_rows, pieces_by_slices, pieces_stacked, pieces_joined, chunks_of_length,
    chunks_of_length_joined, lengths_first, rows_joined,
)}  # fmt: skip
LOOPS |= {
    "stacked_losses": lambda logits, labels, _: torch.stack(
        [F.cross_entropy(logits[i], labels[i]) for i in range(len(labels))]
    ).mean(),
    "chunk_means": lambda logits, labels, _: torch.stack(
        [piece.mean() for piece in rows(logits, labels).chunk(2)]
    ).mean(),
}
