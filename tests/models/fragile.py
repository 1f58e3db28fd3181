"""A model whose batch decides where its numbers break: a logarithm of a negative one, a root at zero, an overflow."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.families import Entry

WIDTH, VOCABULARY, LENGTH = 16, 64, 6


class Logarithm(nn.Module):
    """NaN where ``depth`` is negative."""

    def forward(self, x: Tensor, depth: Tensor) -> Tensor:
        return x + torch.log(depth)[:, None, None]  # here: log


class Root(nn.Module):
    """The same value, and an infinite slope where ``slope`` is 0."""

    def forward(self, x: Tensor, slope: Tensor) -> Tensor:
        return x + torch.sqrt((x * slope[:, None, None]).square())  # here: sqrt


class Squared(nn.Module):
    """Overflows where its weights are huge."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).square())  # here: square


class Masked(nn.Module):
    """Infinities that are meant, and one made in passing: the softmax makes numbers of them."""

    def forward(self, x: Tensor, depth: Tensor) -> Tensor:
        scores = (x @ x.transpose(1, 2)).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), float("-inf"))
        shown = torch.log((depth[:, None, None] > -1e9).to(x.dtype).expand_as(scores).tril())
        return x + torch.softmax(scores + shown, -1) @ x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.masked, self.logarithm, self.root = Squared(), Masked(), Logarithm(), Root()

    def forward(self, x: Tensor, depth: Tensor, slope: Tensor) -> Tensor:
        return self.root(self.logarithm(self.masked(self.mlp(x), depth), depth), slope)


class Fragile(nn.Module):
    """``depths`` and ``slopes`` [b, layers]: what each layer gets of its own."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor, depths: Tensor, slopes: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, depths[:, i], slopes[:, i])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class FragileEntry(Entry):
    def batch(self, num_sequences: int, seed: int) -> dict[str, Tensor]:
        made = super().batch(num_sequences, seed)
        return made | {name: torch.ones_like(made[name]) for name in ("depths", "slopes")}


def fragile() -> Entry:
    inputs: dict[str, Any] = {name: ((LENGTH,), torch.int64, VOCABULARY) for name in ("input_ids", "labels")}
    inputs |= {name: ((4,), torch.float64, None) for name in ("depths", "slopes")}
    return FragileEntry(Fragile(), inputs)
