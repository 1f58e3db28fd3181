"""Models that draw random numbers in many places: attention of every spelling, paths, noise, positions, time first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.families import Entry, tokens

WIDTH, HEADS, VOCABULARY = 32, 4, 64
P = 0.2


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Attention(nn.Module):
    """``way``: causal, or with a mask of booleans or of numbers, or with two key heads."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.groups = way, 2 if way == "groups" else HEADS
        inner = WIDTH // HEADS * self.groups
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * inner), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        q, k, v = _heads(self.q(x), HEADS), _heads(k, self.groups), _heads(v, self.groups)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=P if self.training else 0.0, **self.options(x.shape[1]))
        return self.out(y.transpose(1, 2).flatten(2))

    def options(self, size: int) -> dict[str, Any]:
        near = (torch.arange(size)[:, None] - torch.arange(size)).abs() < 4
        near[1] = False  # a token that sees none
        if self.way == "booleans":
            return {"attn_mask": near}
        if self.way == "numbers":
            return {"attn_mask": (~near).double() * -3.0}
        return {"is_causal": True} | ({"enable_gqa": True} if self.way == "groups" else {})


class Block(nn.Module):
    def __init__(self, way: str = "causal", change: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.change = Attention(way), change
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), P, self.training)
        y = self.down(F.dropout(F.gelu(self.up(self.norm2(x))), P, self.training))
        return x + (y if self.change is None or not self.training else self.change(y))


def drop_path(y: Tensor) -> Tensor:
    """Some sequences leave the block out."""
    return y * torch.bernoulli(torch.full((y.shape[0], 1, 1), 1 - P, dtype=y.dtype)) / (1 - P)


def drop_path_of_uniform(y: Tensor) -> Tensor:
    return y * (torch.rand(y.shape[0], 1, 1, dtype=y.dtype) + (1 - P)).floor() / (1 - P)


def noise(y: Tensor) -> Tensor:
    return y + 0.1 * torch.randn_like(y)


def integers(y: Tensor) -> Tensor:
    return y * torch.randint(0, 2, y.shape, dtype=y.dtype)


class TimeFirst(nn.Module):
    """Blocks over [time, batch, features], as PyTorch's own layers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, 64, P) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return x.transpose(0, 1)


class Model(nn.Module):
    def __init__(self, body: nn.Module, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(length, WIDTH))
        self.body, self.norm, self.head = body, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids) + F.dropout(self.positions, P, self.training)  # the same for all sequences
        x = self.norm(self.body(F.dropout(x, P, self.training)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class OwnMasks(Model):
    """``way``: tokens are hidden; their weights in the mean are dropped; some are kept, as a masked autoencoder does.

    The mean is over numbers that are drawn for each token.
    """

    def __init__(self, way: str) -> None:
        super().__init__(nn.Sequential(Block(), Block()))
        self.way = way

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        valid = labels >= 0
        weights, x = valid.to(self.positions.dtype), self.tokens(input_ids) + self.positions
        if self.way == "weighted":
            weights = F.dropout(weights, P, self.training)
        elif self.way == "hidden":
            hidden = torch.rand(labels.shape) < 0.4
            weights, x = weights * hidden, x.masked_fill(hidden.unsqueeze(-1), 0.0)
        if self.way == "kept":
            scores = torch.rand(labels.shape)
            kept = scores.argsort(1)[:, :8]
            places = kept.unsqueeze(-1).expand(-1, -1, WIDTH)
            weights = weights * torch.ones_like(scores).scatter(1, kept, 0.0)
            x = self.positions.expand(x.shape).scatter(1, places, self.body(x.gather(1, places)))
        else:
            x = self.body(x)
        each = F.cross_entropy(self.head(self.norm(x)).transpose(1, 2), labels, reduction="none")
        return (each * weights).sum() / weights.sum()


def _blocks(*args: Any) -> Entry:
    return Entry(Model(nn.Sequential(Block(*args), Block(*args))), tokens(VOCABULARY, length=16), ("labels",))


def _masked(way: str) -> Entry:
    return Entry(OwnMasks(way), tokens(VOCABULARY, length=16), ("labels",))


MODELS: dict[str, Callable[[], Entry]] = {
    **{f"dropping:{way}": partial(_blocks, way) for way in ("causal", "booleans", "numbers", "groups")},
    **{f"dropping:{f.__name__}": partial(_blocks, "causal", f) for f in (drop_path, drop_path_of_uniform, noise)},
    "dropping:integers": partial(_blocks, "causal", integers),
    **{f"dropping:{way}": partial(_masked, way) for way in ("weighted", "hidden", "kept")},
    "dropping:time_first": lambda: Entry(Model(TimeFirst()), tokens(VOCABULARY, length=16), ("labels",)),
}
