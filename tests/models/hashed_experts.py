"""Experts that the numbers of tokens choose, by a table or by arithmetic; a router's scores only weigh them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.experts import VOCABULARY, WAYS, Layer
from tests.models.sorted_experts import Sorting


class Hashing(nn.Module):
    """Tokens, a norm, a layer of experts with a residual, a head; the loss picks the scores of labels, as the layer
    picks those of experts.

    ``numbers`` gives the experts [t, k] of tokens [t], ``way`` is how rows are sorted, or all are computed.
    """

    def __init__(self, numbers: Numbers, way: Callable[..., Tensor], hidden: int = 8, num_experts: int = 4) -> None:
        super().__init__()
        self.numbers, self.tokens, self.norm = numbers, nn.Embedding(VOCABULARY, hidden), nn.LayerNorm(hidden)
        made = Layer if way in WAYS else Sorting
        self.layer = made(way, hidden, num_experts=num_experts)
        self.layer.top_k = 1 if numbers is of_one else 2
        self.register_buffer("table", torch.randint(num_experts, (VOCABULARY, 2)))  # some twice the same

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        flat = self.norm(x).flatten(0, 1)
        chosen = self.numbers(self, input_ids.flatten())
        weights = self.layer.gate(flat).sigmoid().gather(1, chosen)
        given = flat, weights / weights.sum(-1, keepdim=True), chosen
        given = (part[None] for part in given) if isinstance(self.layer, Layer) else given
        made = self.layer.way(self.layer, *given).view_as(x)
        return 1 - F.linear(x + made, self.tokens.weight).sigmoid().gather(-1, labels.unsqueeze(-1)).mean()


Numbers = Callable[[Hashing, Tensor], Tensor]


def of_table(model: Hashing, ids: Tensor) -> Tensor:
    """As DeepSeek-V4 writes it."""
    return model.table[ids].long()


def of_one(model: Hashing, ids: Tensor) -> Tensor:
    return model.table[:, 0][ids].unsqueeze(1)


def computed(model: Hashing, ids: Tensor) -> Tensor:
    return (ids.unsqueeze(1) * torch.tensor([3, 5])) % model.layer.num_experts


NUMBERS: tuple[Numbers, ...] = (of_table, of_one, computed)
