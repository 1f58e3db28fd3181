"""Models whose sequences no size of tp divides: patches behind a class token, a decoder, an encoder with a mask.

Norms have no eps where a row of zeros would be divided by its size, and tokens are summed, averaged and compared inside
the blocks: padding of a sequence that is not harmless shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.families import Entry, tokens

WIDTH, HEADS, P = 32, 4, 0.2


class Unit(nn.Module):
    """Divides each token by its size: 0/0 for a token of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt() * self.weight


class Block(nn.Module):
    """``between``: what is done to all tokens of [b, s, h] before they are added to the residual."""

    def __init__(
        self, norm: Callable[[], nn.Module], causal: bool = False, between: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.norm1, self.norm2, self.causal, self.between = norm(), norm(), causal, between
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        p = P if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), attn_mask=mask, is_causal=self.causal, dropout_p=p)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), P, self.training)
        y = F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), P, self.training)
        return x + (y if self.between is None else self.between(y))


class Patches(nn.Module):
    """A vision Transformer: a class token before 16 patches."""

    def __init__(self, head: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, WIDTH, 2, 2)
        self.first, self.positions = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 17, WIDTH))
        self.blocks = nn.ModuleList(Block(lambda: nn.LayerNorm(WIDTH)) for _ in range(4))
        self.norm, self.head, self.pooled = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), head

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(pixels).flatten(2).transpose(1, 2)
        places = self.positions / self.positions.square().mean(-1, keepdim=True).sqrt()
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + places
        x = F.dropout(x, P, self.training)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.pooled(self.norm(x))), labels)


class Tokens(nn.Module):
    """``loss``: of logits [b, s, v] and labels [b, s]."""

    def __init__(
        self, length: int, vocabulary: int, blocks: list[Block], loss: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = None if blocks[0].causal else nn.Embedding(length, WIDTH)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(WIDTH)
        self.head, self.loss = nn.Linear(WIDTH, vocabulary, bias=False), loss

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(input_ids)
        if self.positions is not None:  # order is known to a decoder without them: a token of zeros stays one
            x = x + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = F.dropout(x, P, self.training)
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        for block in self.blocks:
            x = block(x, mask)
        return self.loss(self.head(self.norm(x)), labels)


def rows(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    """Of a few classes, which tp does not cut: tokens stay cut up to the last sums, which are over all of them."""
    mask = (labels >= 0).to(logits.dtype)
    found = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return 1e-2 * logits.logsumexp(-1).square().mean() - (found * mask).sum() / mask.sum()


def _with_mean(x: Tensor) -> Tensor:
    return x + x.mean(1, keepdim=True).tanh() + x.amax(1, keepdim=True).sigmoid() + x.logsumexp(1, keepdim=True)


def of_tokens(length: int, vocabulary: int, norm: Any, loss: Any, *extra: str, **block: Any) -> Entry:
    model = Tokens(length, vocabulary, [Block(norm, **block) for _ in range(4)], loss)
    return Entry(model, tokens(vocabulary, *extra, length=length), ("labels",))


def _images(head: Callable[[Tensor], Tensor]) -> Entry:
    return Entry(Patches(head), {"pixels": ((3, 8, 8), torch.float64, None), "labels": ((), torch.int64, 5)})


MODELS: dict[str, Callable[[], Entry]] = {
    "uneven:class token of 17": lambda: _images(lambda x: x[:, 0]),
    "uneven:mean of 17": lambda: _images(lambda x: x.mean(1)),
    "uneven:decoder of 15": lambda: of_tokens(15, 97, Unit, rows, causal=True),
    "uneven:encoder of 13": lambda: of_tokens(13, 61, lambda: nn.LayerNorm(WIDTH), rows, "attention_mask"),
    "uneven:few classes of 9": lambda: of_tokens(9, 13, Unit, _by_hand, causal=True),
    "uneven:tokens mixed of 11": lambda: of_tokens(11, 64, Unit, rows, causal=True, between=_with_mean),
}
