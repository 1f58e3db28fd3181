"""Losses of the rows that a mask selects: masked language models, masked images, regularizers of trained tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, ROWS, LENGTH, CLASSES = 24, 16, 4, 8, 12


class Model(nn.Module):
    """``way`` makes a loss of logits [b, s, v], labels [b, s] and a mask [b, s]."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.tokens, self.norm, self.up = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32)
        self.head, self.way = nn.Linear(32, VOCABULARY), way
        self.register_buffer("balance", torch.linspace(0.5, 1.5, VOCABULARY))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(F.gelu(self.up(self.norm(self.tokens(ids)))))
        return self.way(self, logits, labels, labels < CLASSES)


def build(name: str) -> Model:
    """In float64, with equal weights at every call."""
    torch.manual_seed(0)
    return Model(LOSSES[name] if name in LOSSES else REFUSED[name][0]).double()


def batch() -> dict[str, Tensor]:
    """Each sequence has another number of selected rows. The labels of the others are no classes."""
    drawn = torch.Generator().manual_seed(4)
    ids, labels = (torch.randint(VOCABULARY, (ROWS, LENGTH), generator=drawn) for _ in range(2))
    return {"ids": ids, "labels": torch.where(labels < CLASSES, labels, 10_000)}


def _focal(m: Any, z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    each = F.cross_entropy(z[mask], y[mask], reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def _by_positions(m: Any, z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    at = mask.flatten().nonzero().squeeze(-1)
    return F.cross_entropy(z.flatten(0, 1)[at], y.flatten()[at])


def _of_both(m: Any, z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(z[mask], y[mask]) + z[~mask].logsumexp(-1).square().mean() / 100


def _picked(m: Any, z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    log_p = z[mask].log_softmax(-1)
    return -log_p[torch.arange(log_p.shape[0]), y[mask]].mean()


def _computed(m: Any, z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    sure = z.detach().softmax(-1).amax(-1) < 0.1
    return F.cross_entropy(z[sure], y[sure] % CLASSES)


def _adaptive(m: Any, z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Classes in two clusters, each with numbers of its own."""
    z, y = z.flatten(0, 1), y.clamp(max=CLASSES - 1).flatten()
    out = torch.zeros_like(z[:, 0])
    for first, end in ((0, 5), (5, CLASSES)):
        at = ((y >= first) & (y < end)).nonzero().squeeze(-1)
        if at.numel() == 0:
            continue
        log_p = z.index_select(0, at)[:, first:end].log_softmax(-1)
        out.index_copy_(0, at, -log_p.gather(1, y.index_select(0, at)[:, None] - first).squeeze(1))
    return out.mean()


def _sizes_compared(m: Any, z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """PyTorch asks whether both have as many rows. The mask fills another tensor, and is not written itself."""
    bias = torch.zeros_like(z[..., 0]).masked_fill_(y < CLASSES, 0.5)
    return F.l1_loss((z[..., 0] + bias)[y < CLASSES], y[y < CLASSES].to(z.dtype))


def _written(m: Any, z: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    y = y.clone()
    first = z[y < CLASSES][:, 0]
    y.view(-1).add_(1)
    return F.mse_loss(first, y[y < CLASSES].to(z.dtype))


LOSSES: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda m, z, y, mask: F.cross_entropy(z[mask], y[mask]),
    "smoothed": lambda m, z, y, mask: F.cross_entropy(z[mask], y[mask], label_smoothing=0.1),
    "weighted": lambda m, z, y, mask: F.cross_entropy(z[mask], y[mask], m.balance),
    "some ignored": lambda m, z, y, mask: F.cross_entropy(z[mask], torch.where(y[mask] == 3, -100, y[mask])),
    "sum over a count": lambda m, z, y, mask: F.cross_entropy(z[mask], y[mask], reduction="sum") / mask.sum(),
    "sum over a size": lambda m, z, y, mask: F.cross_entropy(z[mask], y[mask], reduction="sum") / y[mask].numel(),
    "each, then mean": lambda m, z, y, mask: F.cross_entropy(z[mask], y[mask], reduction="none").mean(),
    "focal": _focal,
    "log-likelihood": lambda m, z, y, mask: F.nll_loss(z[mask].log_softmax(-1), y[mask]),
    "probabilities": lambda m, z, y, mask: F.cross_entropy(z[mask], F.one_hot(y[mask], VOCABULARY) * 0.9 + 0.1 / 24),
    "gathered": lambda m, z, y, mask: -z[mask].log_softmax(-1).gather(-1, y[mask][:, None]).squeeze(-1).mean(),
    "scattered": lambda m, z, y, mask: F.mse_loss(z[mask], torch.zeros_like(z[mask]).scatter(1, y[mask][:, None], 1.0)),
    "picked": _picked,
    "taken along a dim": lambda m, z, y, mask: (
        -torch.take_along_dim(z[mask].log_softmax(-1), y[mask][:, None], 1).mean()
    ),
    "a mask twice": lambda m, z, y, mask: (z[mask] - F.one_hot(y[y < CLASSES], VOCABULARY)).square().mean(),
    "sizes compared": _sizes_compared,
    "classes weighted": lambda m, z, y, mask: (z[mask].logsumexp(-1) * m.balance[y[mask]]).mean(),
    "embedded": lambda m, z, y, mask: F.mse_loss(z[mask][:, :WIDTH], m.tokens(y[mask])),
    "margins": lambda m, z, y, mask: F.multi_margin_loss(z[mask], y[mask]),
    "clusters": _adaptive,
    "positions": _by_positions,
    "both sides": _of_both,
    "z": lambda m, z, y, mask: z[mask].logsumexp(-1).square().mean(),
    "squares": lambda m, z, y, mask: F.mse_loss(z[mask][:, 0], (y[mask] % 5).to(z)),
    "smooth distances": lambda m, z, y, mask: F.smooth_l1_loss(z[mask][:, 0], y[mask].to(z.dtype)),
    "each of two": lambda m, z, y, mask: F.binary_cross_entropy(z[mask].sigmoid()[:, 0], (y[mask] % 2).to(z.dtype)),
    "divergence": lambda m, z, y, mask: F.kl_div(
        z[mask].log_softmax(-1), z.detach()[mask].mul(0.9).softmax(-1), reduction="batchmean"
    ),
    "whole, then selected": lambda m, z, y, mask: ((z - 1) ** 2).mean(-1)[mask].mean(),
    "masked_select": lambda m, z, y, mask: torch.masked_select(z.square().mean(-1), mask).mean(),
    "masked_select, expanded": lambda m, z, y, mask: F.l1_loss(
        z.masked_select(mask[..., None]), (y[..., None] % 5).to(z).expand_as(z).masked_select(mask[..., None])
    ),
    "by feature": lambda m, z, y, mask: z[mask].sum(0).square().sum() / mask.sum() ** 2,
    "quotients": lambda m, z, y, mask: (z[mask] / (CLASSES - y[mask])[:, None]).tanh().mean(),
    "of a mask that is computed": _computed,
}
REFUSED: dict[str, tuple[Callable[[Any, Tensor, Tensor, Tensor], Tensor], str]] = {
    "variance": (lambda m, z, y, mask: z[mask].var(), "aten.var"),
    "product": (lambda m, z, y, mask: z[mask].softmax(-1).prod(0).sum(), "aten.prod"),
    "sorted": (lambda m, z, y, mask: z[mask].sort(0)[0][:4].mean(), "aten.sort"),
    "numbered": (lambda m, z, y, mask: (z[mask] * torch.arange(z[mask].shape[0])[:, None]).mean(), "may mix rows"),
    "picked of others": (
        lambda m, z, y, mask: z[~mask][torch.arange(z[mask].shape[0]), y[mask]].mean(),
        "depends on data",
    ),
    "of two masks": (lambda m, z, y, mask: (z[mask] - z[y < 3]).mean(), "depends on data"),
    "one more": (lambda m, z, y, mask: z[mask].sum() / (y[mask].numel() + 1), "depends on data"),
    "written between": (_written, "data-dependent"),
    "a number of Python": (lambda m, z, y, mask: z[mask].sum() / len(y[mask]), "data-dependent"),
    "another if it is empty": (
        lambda m, z, y, mask: F.cross_entropy(z[mask], y[mask]) if mask.any() else z.sum() * 0,
        "whether any row is selected",
    ),
}
