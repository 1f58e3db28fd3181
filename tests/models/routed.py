"""Experts that a test routes as it likes: the choice of each token id stands in a table of scores.

``loop``: each expert has parameters of its own. ``stacks``: rows sorted by expert, grouped products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, WIDTH = 24, 8, 16  # cut over etp, rows of stacks still begin where 16 bytes do, in bfloat16 too

Experts = Callable[["Routed", Tensor, Tensor, Tensor], Tensor]  # model, tokens [t, h], probs [t, k], chosen [t, k]


class Routed(nn.Module):
    """Tokens, a norm, experts by ``scores`` of the token's id and a small gate, with a residual; a head, a mean."""

    def __init__(self, way: Experts, scores: Tensor, top_k: int) -> None:
        super().__init__()
        if way is stacks:  # it defines the op; in the forward, the id that the import draws would be refused
            from transformers.integrations import moe  # noqa: F401
        num_experts = scores.shape[1]
        self.way, self.top_k, self.num_experts = way, top_k, num_experts
        self.tokens, self.norm = nn.Embedding(VOCABULARY, HIDDEN), nn.LayerNorm(HIDDEN)
        self.gate, self.scores = nn.Linear(HIDDEN, num_experts), nn.Embedding(VOCABULARY, num_experts)
        if way is loop:
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.GELU(), nn.Linear(WIDTH, HIDDEN)) for _ in range(num_experts)
            )
        else:
            self.up = nn.Parameter(torch.randn(num_experts, HIDDEN, WIDTH) * 0.3)
            self.down = nn.Parameter(torch.randn(num_experts, WIDTH, HIDDEN) * 0.3)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        with torch.no_grad():
            self.scores.weight.copy_(scores)
            self.gate.weight.mul_(0.02)  # seen in gradients, too small to change a choice
            self.gate.bias.zero_()

    def chosen(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [t, h], and of each its probs and experts [t, k]."""
        x = self.norm(self.tokens(input_ids)).flatten(0, 1)
        scores = self.gate(x) + self.scores(input_ids).flatten(0, 1)
        return x, *scores.softmax(-1).topk(self.top_k, -1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, probs, chosen = self.chosen(input_ids)
        y = self.tokens(input_ids) + self.way(self, x, probs, chosen).view(*input_ids.shape, HIDDEN)
        return F.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())


def loop(model: Routed, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        token, choice = torch.where(chosen == number)
        out = out.index_add(0, token, expert(x[token]) * probs[token, choice, None])
    return out


def stacks(model: Routed, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """As transformers writes it."""
    numbers, order = torch.sort(chosen.reshape(-1))
    counts = torch.histc(numbers.float(), bins=model.num_experts, min=0, max=model.num_experts - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    rows = x[order // model.top_k]
    made = _grouped(F.gelu(_grouped(rows, model.up, ends)), model.down, ends)
    made = made * probs.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.size(0), device=order.device)
    return made[back].view(*chosen.shape, -1).sum(1)


def _grouped(x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """The kernel of bfloat16; what transformers has for the rest."""
    if x.dtype != torch.bfloat16:
        return torch.ops.transformers.grouped_mm_fallback(x, stack, ends)
    return F.grouped_mm(x, stack, offs=ends)
