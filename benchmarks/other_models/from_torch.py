"""torch's own nn.Transformer and friends, as in its tutorials."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Translation(nn.Module):
    """nn.Transformer with sinusoidal positions: the sequence-to-sequence tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
        self.src, self.tgt = nn.Embedding(96, 64), nn.Embedding(96, 64)
        self.generator = nn.Linear(64, 96)
        angle = torch.arange(32)[:, None] * torch.exp(-torch.arange(0, 64, 2) * math.log(10000) / 64)
        self.register_buffer("pos_embedding", torch.stack((angle.sin(), angle.cos()), -1).flatten(1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        size = labels.shape[1] - 1
        mask = nn.Transformer.generate_square_subsequent_mask(size, dtype=self.pos_embedding.dtype)
        source = self.src(input_ids) * math.sqrt(64) + self.pos_embedding[: input_ids.shape[1]]
        target = self.tgt(labels[:, :-1]) * math.sqrt(64) + self.pos_embedding[:size]
        logits = self.generator(self.transformer(source, target, tgt_mask=mask))
        return F.cross_entropy(logits.reshape(-1, 96), labels[:, 1:].reshape(-1), ignore_index=0)


def seq2seq() -> nn.Module:
    return Translation()
