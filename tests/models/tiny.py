"""The smallest model with one of everything that a pass rewrites: two blocks that fit on a page when printed."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import Plan, plan

BATCH, LENGTH, WIDTH, VOCABULARY = 2, 4, 8, 16


class MLP(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(BATCH, LENGTH, 2, WIDTH // 2).transpose(1, 2) for y in self.qkv(x).split(WIDTH, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))


class Tiny(nn.Module):
    """Tokens and learned positions, ``blocks``, a head and a mean over tokens."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(LENGTH, device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def planned(blocks: str = "mlp mlp", dropout: float = 0.0, sequence_parallel: bool = False, **mesh: int) -> Plan:
    """The plan of a Tiny with the blocks named; made once for each mesh."""
    with torch.device("meta"):
        made = Tiny(*(MLP(dropout) if name == "mlp" else Attention() for name in blocks.split()))
    given = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
    spec: dict[str, Any] = {
        "mesh": mesh,
        "batch": {"global": 4, "micro": BATCH},
        "inputs": {"input_ids": given, "labels": given},
        "tensor_parallel": {"vocabulary_multiple": 4, "sequence_parallel": sequence_parallel},
    }
    if mesh.get("vpp", 1) > 1:
        spec["pipeline"] = {"schedule": "interleaved_1f1b"}
    return plan(made, spec)
