"""Losses that are no sum over sequences, or that tell the sequences of a batch apart: all of them must be told."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tools.loss_shares import Loss, rows


def quantile(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    each = rows(logits, labels)
    return (each * (each < each.detach().quantile(0.8))).mean()


def softmax_over_batch(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    each = rows(logits, labels).mean(1)
    return (each * each.detach().softmax(0)).sum()


def contrastive(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    z = logits.mean(1)
    return F.cross_entropy(z @ z.T, torch.arange(len(labels)))


def weighted_loop(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    pairs = enumerate(zip(logits, labels, strict=True))
    return sum((i + 1) * F.cross_entropy(x, y) for i, (x, y) in pairs) / len(labels)


def neighbours(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    each, n = rows(logits, labels), len(labels)
    return sum((each[i] - each[(i + 1) % n]).pow(2).mean() for i in range(n)) / n


def moving_average(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    total = torch.zeros((), dtype=logits.dtype)
    for x, y in zip(logits, labels, strict=True):
        total = 0.9 * total + 0.1 * F.cross_entropy(x, y)
    return total


def means_of_chunks(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    pieces = zip(logits.flatten(0, 1).chunk(2), labels.flatten().chunk(2), strict=True)
    return sum(F.cross_entropy(x, y) for x, y in pieces) / 2


def weighted_chunks(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    """Another weight for each chunk, and other chunks in a larger batch."""
    sums = torch.stack([piece.sum() for piece in rows(logits, labels).chunk(2)])
    return sums @ torch.arange(1, len(sums) + 1).to(sums.dtype)


def pairs(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    return torch.einsum("bi,ci->", logits.sum(1), logits.sum(1) * 2 + 1)


def columns(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    """The cosine of two vectors with a number of each sequence."""
    return F.cosine_embedding_loss(logits[:, 0, 0], logits[:, 1, 1], torch.tensor(1))


def means_of_ranges(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    x, y = logits.flatten(0, 1), labels.flatten()
    return sum((F.cross_entropy(x[i : i + 4], y[i : i + 4]) for i in range(0, len(x), 4)), torch.zeros(()))


OF_ANOTHER_SIZE: dict[str, Loss] = {means_of_ranges.__name__: means_of_ranges}
OF_ANOTHER_SIZE |= {
    "number_of_items": lambda logits, labels, _: rows(logits, labels).sum() / (labels[0, 0] + 200),
}
NO_SUMS: dict[str, Loss] = {f.__name__: f for f in (
    quantile, softmax_over_batch, contrastive, weighted_loop, neighbours, moving_average, means_of_chunks,
    weighted_chunks, pairs, columns,
)}  # fmt: skip
NO_SUMS |= {
    "weights_by_place": lambda logits, labels, _: (
        rows(logits, labels) * torch.arange(1, len(labels) + 1)[:, None]
    ).mean(),
    "first_half": lambda logits, labels, _: rows(logits, labels)[: (len(labels) + 1) // 2].mean(),
    "first_alone": lambda logits, labels, _: F.cross_entropy(logits[0], labels[0]),
    "power_of_mean": lambda logits, labels, _: rows(logits, labels).mean() ** 2,
    "shift_across_sequences": lambda logits, labels, _: F.cross_entropy(
        logits.flatten(0, 1)[:-1], labels.flatten()[1:]
    ),
    "rounded": lambda logits, labels, _: logits.mean() + (logits.detach().sum() * 10).to(torch.int64),
}
