"""Routers whose scores are computed in float32, or by a weight that is computed itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import experts


class Routed(experts.Layer):
    """A layer of experts with another router: ``score`` gives its scores [.., E] in float32."""

    def __init__(self, score: Score, way: experts.Way = experts.stacked) -> None:
        super().__init__(way)
        self.score, (out, inner) = score, self.gate.weight.shape
        self.size, self.offset = nn.Parameter(torch.rand(out, 1) + 0.5), nn.Parameter(torch.randn(out))
        self.a, self.b = nn.Parameter(torch.randn(2, inner) * 0.3), nn.Parameter(torch.randn(out, 2) * 0.3)
        self.register_buffer("known", torch.randn(out))

    def forward(self, x: Tensor) -> Tensor:
        probs, chosen = self.score(self, x).softmax(-1).topk(self.top_k, -1)
        return self.way(self, x, probs.to(x.dtype), chosen)


Score = Callable[[Routed, Tensor], Tensor]


def plain(layer: Routed, x: Tensor) -> Tensor:
    return layer.gate(x).float()


def cast(layer: Routed, x: Tensor) -> Tensor:
    """As DeepSeek-V3 and GLM-4-MoE write it, with a known bias of the choices."""
    return F.linear(x.float(), layer.gate.weight.float()) + layer.known.float()


def cast_bias(layer: Routed, x: Tensor) -> Tensor:
    return F.linear(x.float(), layer.gate.weight.float(), layer.gate.bias.float())


def moved_by_a_known_value(layer: Routed, x: Tensor) -> Tensor:
    """The weight is computed from a parameter, a buffer and a constant."""
    weight = layer.gate.weight.float() * (layer.known.float().exp() + torch.tensor(0.5))[:, None]
    return F.linear(x.float(), weight)


def normed(layer: Routed, x: Tensor) -> Tensor:
    """The direction of a weight, times a size."""
    weight = layer.gate.weight.float()
    return F.linear(x.float(), layer.size.float() * weight / weight.norm(dim=1, keepdim=True))


def low_rank(layer: Routed, x: Tensor) -> Tensor:
    return F.linear(x, layer.gate.weight + layer.b @ layer.a, layer.gate.bias).float()


def low_rank_beside(layer: Routed, x: Tensor) -> Tensor:
    """As peft writes it: with a product of its own."""
    return (layer.gate(x) + 0.5 * F.linear(F.linear(x, layer.a), layer.b)).float()


SCORES = (plain, cast, cast_bias, moved_by_a_known_value, normed, low_rank, low_rank_beside)


# ---- experts that a ranking of more, or of all, has in its first places


class Ranking(experts.Layer):
    """``rank`` gives the scores and numbers [.., k] of the experts that a token likes best."""

    def __init__(self, rank: Rank, way: experts.Way) -> None:
        super().__init__(way)
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x, *self.rank(self.gate(x).softmax(-1), self.top_k))


Rank = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def by_sort(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    best, order = scores.sort(-1, descending=True)
    return best[..., :top_k], order[..., :top_k]


def by_argsort(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The last of all, from the worst on."""
    chosen = scores.argsort(-1)[..., -top_k:]
    return scores.gather(-1, chosen), chosen


def of_one_more(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    best, order = scores.topk(top_k + 1, -1)
    return best[..., :top_k] - best[..., -1:], order[..., :top_k]


RANKS: tuple[Rank, ...] = (by_sort, by_argsort, of_one_more)


# ---- routers whose choice no indices say


def by_threshold(layer: experts.Layer, x: Tensor) -> Tensor:
    """Every expert whose score is at least the k-th best."""
    scores = layer.gate(x).softmax(-1)
    chosen = scores >= scores.topk(layer.top_k, -1).values[..., -1:]
    return sum(expert(x) * (scores * chosen)[..., e, None] for e, expert in enumerate(layer.experts))


def in_two_levels(layer: experts.Layer, x: Tensor) -> Tensor:
    """The better half of the experts, then the best of it."""
    scores = layer.gate(x).softmax(-1).unflatten(-1, (2, -1))
    half = scores.sum(-1).max(-1).indices
    best, place = scores.max(-1)
    number = 2 * half + place.gather(-1, half.unsqueeze(-1)).squeeze(-1)
    weight = best.gather(-1, half.unsqueeze(-1))
    return sum(expert(x) * weight * (number == e).unsqueeze(-1) for e, expert in enumerate(layer.experts))


class Unrouted(experts.Layer):
    def __init__(self, way: Callable[[experts.Layer, Tensor], Tensor]) -> None:
        super().__init__(experts.masks)
        self.choose = way

    def forward(self, x: Tensor) -> Tensor:
        return self.choose(self, x)
