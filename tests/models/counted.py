"""Losses whose divisors come from shapes alone, or that loop over the batch, on a model of four blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.families import IGNORED, Entry
from tests.models.own import with_loss
from tests.models.own_losses import each_loss


def filled_mask(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    mask = torch.zeros(labels.shape, dtype=logits.dtype)
    mask[:, 2:] = 1
    return (each_loss(logits, labels) * mask).sum() / mask.sum()


def tensor_of_size(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    return each_loss(logits, labels).sum() / torch.tensor(labels.numel())


def loop_over_batch(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    pairs = zip(logits, labels, strict=True)
    return sum(F.cross_entropy(x, y, reduction="sum") / x.shape[0] for x, y in pairs) / len(labels)


def chunks_of_rows(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    pieces = zip(logits.flatten(0, 1).chunk(4), labels.flatten().chunk(4), strict=True)
    return sum(F.cross_entropy(x, y, reduction="sum") for x, y in pieces) / (labels != IGNORED).sum()


def stacked(logits: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
    return torch.stack([row.mean() for row in each_loss(logits, labels)]).mean()


MODELS: dict[str, Callable[[], Entry]] = {
    "counted:" + loss.__name__: with_loss(loss)
    for loss in (filled_mask, tensor_of_size, loop_over_batch, chunks_of_rows, stacked)
}
