"""Experts whose rows are sorted by expert and multiplied in grouped products, in the spellings that people use."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  # registers the product below
from torch import Tensor, nn

grouped = torch.ops.transformers.grouped_mm_fallback  # PyTorch's own has no meta kernel of float32


class Sorting(nn.Module):
    """``num_experts`` of [hidden → width → hidden], ``top_k`` a token; ``way`` is how rows are sorted."""

    def __init__(self, way: Way, hidden: int = 8, width: int = 12, num_experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.way, self.num_experts, self.top_k = way, num_experts, top_k
        self.gate = nn.Linear(hidden, num_experts)
        self.up = nn.Parameter(torch.randn(num_experts, hidden, width) * 0.3)
        self.bias = nn.Parameter(torch.randn(num_experts, width) * 0.3)
        self.down = nn.Parameter(torch.randn(num_experts, width, hidden) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        probs, chosen = self.gate(flat).softmax(-1).topk(self.top_k, -1)
        return self.way(self, flat, probs, chosen).view_as(x)

    def computed(self, rows: Tensor, ends: Tensor, ids: Tensor) -> Tensor:
        inner = F.gelu(grouped(rows, self.up, ends) + self.bias[ids])
        return grouped(inner, self.down, ends)


Way = Callable[[Sorting, Tensor, Tensor, Tensor], Tensor]


def by_places(layer: Sorting, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """As transformers: sorted, and brought back by the places of all pairs."""
    ids, order = torch.sort(chosen.reshape(-1))
    counts = torch.histc(ids.float(), bins=layer.num_experts, min=0, max=layer.num_experts - 1)
    made = layer.computed(x[order // layer.top_k], counts.cumsum(0).int(), ids) * probs.reshape(-1)[order][:, None]
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=order.device)
    return made[places].view(*chosen.shape, -1).sum(1)


def added(layer: Sorting, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Results are added to the rows of their tokens."""
    order = chosen.reshape(-1).argsort(stable=True)
    token = order // layer.top_k
    ends = torch.bincount(chosen.reshape(-1), minlength=layer.num_experts).cumsum(0).int()
    made = layer.computed(x[token], ends, chosen.reshape(-1)[order]) * probs.reshape(-1)[order].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, token, made)


def of_named_tokens(layer: Sorting, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """The token of each pair is written down before the pairs are sorted; the counts are sums of a one-hot tensor."""
    token = torch.arange(len(x), device=x.device).repeat_interleave(layer.top_k)
    ids, order = chosen.flatten().sort(stable=True)
    ends = F.one_hot(chosen.flatten(), layer.num_experts).sum(0).cumsum(0).to(torch.int32)
    made = layer.computed(x[token[order]], ends, ids)
    return (made[order.argsort()].view(*chosen.shape, -1) * probs.unsqueeze(-1)).sum(1)


def repeated(layer: Sorting, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Every token is repeated, and the copies are sorted."""
    order = torch.argsort(chosen.flatten(), stable=True)
    ends = torch.bincount(chosen.flatten(), minlength=layer.num_experts).cumsum(0).to(torch.int32)
    copies = x.repeat_interleave(layer.top_k, 0) * probs.reshape(-1, 1)
    made = layer.computed(copies[order], ends, chosen.flatten()[order])
    return made[torch.argsort(order)].view(len(x), layer.top_k, -1).sum(1)


WAYS: tuple[Way, ...] = (by_places, added, of_named_tokens, repeated)


# ---- rows of which a rank cannot compute its own alone


def first_twice(layer: Sorting, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """The result of the first choice stands for those of the others too."""
    order = chosen.reshape(-1).argsort(stable=True)
    ends = torch.bincount(chosen.reshape(-1), minlength=layer.num_experts).cumsum(0).int()
    made = layer.computed(x[order // layer.top_k], ends, chosen.reshape(-1)[order])
    firsts = order.argsort().view(chosen.shape)[:, :1].expand(chosen.shape).reshape(-1)
    return (made[firsts].view(*chosen.shape, -1) * probs.unsqueeze(-1)).sum(1)


def limited(layer: Sorting, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """The first half of all pairs alone counts."""
    order = torch.argsort(chosen.flatten(), stable=True)
    ends = torch.bincount(chosen.flatten(), minlength=layer.num_experts).cumsum(0).to(torch.int32)
    made = layer.computed(x[order // layer.top_k], ends, chosen.flatten()[order])
    made = made * (order < len(order) // 2).unsqueeze(-1)
    return (made[torch.argsort(order)].view(*chosen.shape, -1) * probs.unsqueeze(-1)).sum(1)


def mixed(layer: Sorting, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Rows in their order are weighted with weights in the order of the tokens."""
    order = torch.argsort(chosen.flatten(), stable=True)
    ends = torch.bincount(chosen.flatten(), minlength=layer.num_experts).cumsum(0).to(torch.int32)
    made = layer.computed(x[order // layer.top_k], ends, chosen.flatten()[order]) * probs.reshape(-1, 1)
    return made[torch.argsort(order)].view(*chosen.shape, -1).sum(1)


def accumulated(layer: Sorting, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """A row is a sum of those before it."""
    order = torch.argsort(chosen.flatten(), stable=True)
    ends = torch.bincount(chosen.flatten(), minlength=layer.num_experts).cumsum(0).to(torch.int32)
    made = layer.computed(x[order // layer.top_k], ends, chosen.flatten()[order]).cumsum(0)
    return (made[torch.argsort(order)].view(*chosen.shape, -1) * probs.unsqueeze(-1)).sum(1)


REFUSED: tuple[Way, ...] = (limited, mixed, accumulated)
