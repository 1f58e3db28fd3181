"""A decoder with modules that predict further tokens (DeepSeek-V3, section 2.2): losses stand between its blocks.

h_0 = trunk(ids)        h_k = block_k(W_k [norm(h_{k-1}), norm(embedding of the k-th next token)])
loss = Σ_k weight · cross_entropy(head(h_k), labels shifted by k)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY, IGNORED = 16, 4, 32, -100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Further(nn.Module):
    """One further token: of the hidden values [b, s, h] and the embeddings of later tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_norm, self.token_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.join, self.block = nn.Linear(2 * WIDTH, WIDTH, bias=False), Block()

    def forward(self, x: Tensor, later: Tensor) -> Tensor:
        return self.block(self.join(torch.cat((self.hidden_norm(x), self.token_norm(later)), -1)))


class FurtherTokens(nn.Module):
    """``own_heads``: a head for each distance, not one for all."""

    def __init__(self, *, own_heads: bool = False, num_further: int = 2) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.further = nn.ModuleList(Further() for _ in range(num_further))
        heads = num_further + 1 if own_heads else 1
        self.heads = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY, bias=False) for _ in range(heads))
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        loss = self.loss(x, labels, 0)
        for distance, further in enumerate(self.further, 1):
            x = further(x, self.tokens(shifted(ids, distance, 0)))
            loss = loss + 0.3 * self.loss(x, shifted(labels, distance, IGNORED), distance)
        return loss

    def loss(self, x: Tensor, labels: Tensor, distance: int) -> Tensor:
        head = self.heads[distance % len(self.heads)]
        return F.cross_entropy(head(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def shifted(ids: Tensor, distance: int, value: int) -> Tensor:
    return F.pad(ids[:, distance:], (0, distance), value=value)
