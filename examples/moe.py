"""A plain single-device Transformer with experts, without any code for parallelism, like a user's model.

Each block has a shared SwiGLU and several more behind a softmax router; every token goes to two. The loop over
them picks the rows that chose one, as most people write it: their number is known from the data alone. Plan it with
``meshwright plan examples/moe.py:build examples/moe.yaml``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (project(x).view(heads).transpose(1, 2) for project in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A shared expert for every token, and ``top_k`` of ``num_experts`` by the router's choice."""

    def __init__(self, width: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(width, hidden) for _ in range(num_experts))
        self.shared = SwiGLU(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, x.shape[-1])
        probs, chosen = self.router(tokens).softmax(dim=-1).topk(self.top_k, dim=-1)
        probs = probs / probs.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(tokens[token]) * probs[token, choice, None])
        return out.view(x.shape) + self.shared(x)


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, num_heads)
        self.experts = Experts(width, hidden, num_experts, top_k)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.experts(self.norm2(x))


class MoE(nn.Module):
    """``input_ids`` and ``targets`` are [batch, length]; ``targets`` are the next tokens, -100 for ignored places."""

    def __init__(
        self,
        vocabulary: int = 256,
        length: int = 64,
        width: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        hidden: int = 128,
        num_experts: int = 8,
        top_k: int = 2,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, hidden, num_experts, top_k) for _ in range(num_layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build() -> nn.Module:
    """For the command line: ``examples/moe.py:build``."""
    return MoE()
