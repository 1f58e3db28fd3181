"""A plain single-device BERT that knows nothing of parallelism, with both LayerNorm placements of Shoeybi et al. 2019
(figure 7):

    build_post    x = norm(x + sublayer(x))      the original; large ones become unstable in the paper
    build_pre     x = x + sublayer(norm(x))      the residual is clean; one norm more at the end

It learns masked words, with an output embedding tied to the input embedding, and the order of two runs of sentences.
Plan it with ``meshwright plan examples/bert.py:build_pre examples/bert.yaml``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (project(x).view(heads).transpose(1, 2) for project in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """The parts that both placements share; ``forward`` is the original one."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x, seen)))
        return self.norm2(x + self.dropout(self.mlp(x)))


class PreBlock(Block):
    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), seen))
        return x + self.dropout(self.mlp(self.norm2(x)))


class BERT(nn.Module):
    """``input_ids``, ``token_type_ids`` (0, 1), ``attention_mask`` (0 on padding) and ``labels`` (-100 for words that
    are not masked) are [batch, length]; ``sentence_order_label`` (0, 1) is [batch]. Gives the loss.
    """

    def __init__(
        self,
        *,
        normalize_first: bool,
        vocabulary: int = 256,
        length: int = 64,
        width: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.segments = nn.Embedding(2, width)
        self.embedding_norm = nn.Identity() if normalize_first else nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        block = PreBlock if normalize_first else Block
        self.blocks = nn.ModuleList(block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width) if normalize_first else nn.Identity()
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.tokens.weight
        self.pooler, self.order = nn.Linear(width, width), nn.Linear(width, 2)
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        sentence_order_label: Tensor,
    ) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(positions) + self.segments(token_type_ids)
        x = self.dropout(self.embedding_norm(x))
        seen = (attention_mask != 0)[:, None, None, :]
        for block in self.blocks:
            x = block(x, seen)
        x = self.norm(x)
        words = self.head(self.transform_norm(F.gelu(self.transform(x))))
        order = self.order(torch.tanh(self.pooler(x[:, 0])))
        masked = F.cross_entropy(words.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return masked + F.cross_entropy(order, sentence_order_label)


def build_post() -> BERT:
    """The model of examples/bert.yaml: bytes as tokens, 64 a sequence, 4 blocks 128 wide, LayerNorm after the sum."""
    torch.manual_seed(1234)
    return BERT(normalize_first=False)


def build_pre() -> BERT:
    """The same with LayerNorm at the input of each sublayer."""
    torch.manual_seed(1234)
    return BERT(normalize_first=True)
