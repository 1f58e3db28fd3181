"""A small Transformer in many spellings of what reads a sequence: attention, mixing of tokens, positions, losses.

Each spelling is one function of its table; all others are as in the plain model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LENGTH, VOCABULARY, SEQUENCES = 16, 4, 16, 32, 4


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH), generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels}


# ---- scores: (scores [b, h, q, k], module) → scores


def _positions(scores: Tensor) -> tuple[Tensor, Tensor]:
    places = torch.arange(scores.shape[-1])
    return places[:, None], places[None, :]


def _tril(scores: Tensor, m: Attention) -> Tensor:
    length = scores.shape[-1]
    return scores.masked_fill(~m.seen[:length, :length], -math.inf)


def _triu(scores: Tensor, m: Attention) -> Tensor:
    length = scores.shape[-1]
    return scores + torch.triu(torch.full((length, length), -math.inf), 1)


def _alibi(scores: Tensor, m: Attention) -> Tensor:
    q, k = _positions(scores)
    return (scores + (k - q) * m.slopes[:, None, None]).masked_fill(k > q, -math.inf)


def _relative(scores: Tensor, m: Attention) -> Tensor:
    q, k = _positions(scores)
    return scores + m.relative(k - q + LENGTH - 1).permute(2, 0, 1)


def _window(scores: Tensor, m: Attention) -> Tensor:
    q, k = _positions(scores)
    return scores.masked_fill((q < k) | (q - k >= 5), -math.inf)


SCORES: dict[str, Callable[[Tensor, Attention], Tensor]] = {
    "tril": _tril,
    "triu": _triu,
    "alibi": _alibi,
    "relative": _relative,
    "window": _window,
}
FUSED = {"causal": True, "full": False}


class Attention(nn.Module):
    seen: Tensor
    slopes: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.out, self.kind = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), kind
        self.relative = nn.Embedding(2 * LENGTH - 1, HEADS)
        self.register_buffer("seen", torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.kind in FUSED:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=FUSED[self.kind])
        elif self.kind == "linear":
            y = torch.einsum("bhtd,bhtde->bhte", q, torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2))
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
            y = SCORES[self.kind](scores, self).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


# ---- mixing of tokens: (h [b, s, n], module) → h


def _chunked_scan(h: Tensor, size: int) -> Tensor:
    """y[t] = q[t] S[t], S[t] = a[t] S[t-1] + k[t] v[t]: within chunks, and over the states [b, chunks + 1, k, n]
    between them.
    """
    rest = -h.shape[1] % size
    of_tokens = (h[..., :4], h[..., 4:8], h, F.logsigmoid(h[..., 8:9]))
    q, k, v, decay = (F.pad(x, (0, 0, 0, rest)).unflatten(1, (-1, size)) for x in of_tokens)
    inner = decay.squeeze(-1).cumsum(2)  # [b, chunks, size]
    y = (q @ k.mT * _decays(inner)) @ v
    ends = (k * (inner[:, :, -1:] - inner).exp()[..., None]).mT @ v
    states = torch.cat([torch.zeros_like(ends[:, :1]), ends], 1)
    between = _decays(F.pad(inner[:, :, -1], (1, 0)).cumsum(1))
    begins = torch.einsum("bzc,bckn->bzkn", between, states)[:, :-1]
    return (y + q * inner.exp()[..., None] @ begins).flatten(1, 2)[:, : h.shape[1]]


def _decays(sums: Tensor) -> Tensor:
    """exp(sums[l] - sums[m]) for m ≤ l: [.., l, m] of [.., l]."""
    later = torch.ones(sums.shape[-1], sums.shape[-1], dtype=torch.bool).triu(1)
    return (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -math.inf).exp()


MIXING: dict[str, Callable[[Tensor, Block], Tensor]] = {
    "none": lambda h, m: h,
    "shift by pad": lambda h, m: h + m.mix * F.pad(h, (0, 0, 1, -1)),
    "shift by cat": lambda h, m: h + m.mix * torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1),
    "convolution": lambda h, m: h + m.convolution(h.transpose(1, 2)).transpose(1, 2),
    "roll": lambda h, m: h + torch.roll(h, 1, 1),
    "flip": lambda h, m: h + h.flip(1),
    "cumsum": lambda h, m: h + h.cumsum(1) / 10,
    "softmax over tokens": lambda h, m: h + (h.softmax(1) * h).sum(1, keepdim=True),
    "scan of 4 chunks": lambda h, m: h + _chunked_scan(h, 4),
    "scan of 3 chunks": lambda h, m: h + _chunked_scan(h, 6),
    "fft": lambda h, m: h + torch.fft.fft(h, dim=1).real / 10,
    "even, odd": lambda h, m: torch.stack([h[:, 0::2], h[:, 1::2]], 2).flatten(1, 2),
    "mean of tokens": lambda h, m: h + h.mean(1, keepdim=True),
    "most of tokens": lambda h, m: h + h.amax(1, keepdim=True),
    "first token": lambda h, m: h * h[:, :1].sigmoid(),
    "first token, complex": lambda h, m: h + (torch.complex(h, h.cos())[:, :1] * torch.complex(h.sin(), h)).real,
    "last token": lambda h, m: h + h[:, -1:] * 0.5,
    "norm over batch and tokens": lambda h, m: (h - h.mean((0, 1), True)) / (h.var((0, 1), keepdim=True) + 1),
}


class Block(nn.Module):
    def __init__(self, attention: str, mixing: str) -> None:
        super().__init__()
        self.norms, self.attention = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2)), Attention(attention)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mix, self.mixing = nn.Parameter(torch.rand(WIDTH)), mixing
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(MIXING[self.mixing](self.norms[0](x), self))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


# ---- positions: (x [b, s, n], ids [b, s], module) → x

POSITIONS: dict[str, Callable[[Tensor, Tensor, Model], Tensor]] = {
    "none": lambda x, ids, m: x,
    "embedding": lambda x, ids, m: x + m.places(torch.arange(x.shape[1])),
    "parameter": lambda x, ids, m: x + m.table[: x.shape[1]],
    "buffer": lambda x, ids, m: x + m.waves[: x.shape[1]],
    "count of tokens": lambda x, ids, m: x + m.places(((ids != 0).long().cumsum(1) - 1).clamp(min=0)),
    "segments": lambda x, ids, m: x + m.places(torch.arange(x.shape[1]) // 4),
    "weights": lambda x, ids, m: x * m.weight[:, None],
    "weights that sum to one": lambda x, ids, m: x * m.weight.softmax(0)[:, None],
    "prompt": lambda x, ids, m: torch.cat([m.table[None, :4].expand(len(x), -1, -1), x], 1),
}


# ---- losses: (hidden [b, s, n], ids, labels, module) → loss


def _plain(x: Tensor, ids: Tensor, labels: Tensor, m: Model) -> Tensor:
    return F.cross_entropy(m.head(x).flatten(0, 1), labels.flatten())


def _of_tokens(x: Tensor, labels: Tensor, m: Model) -> Tensor:
    return F.cross_entropy(m.head(x).transpose(1, 2), labels, reduction="none")


def _shifted(x: Tensor, labels: Tensor, m: Model, by: int = 1) -> Tensor:
    return F.cross_entropy(m.head(x)[:, :-by].flatten(0, 1), labels[:, by:].flatten())


def _of_next_too(x: Tensor, ids: Tensor, labels: Tensor, m: Model) -> Tensor:
    """Multi-token prediction: a block of its own reads each token beside the next one."""
    joined = m.norm(m.blocks[0](m.norm(x[:, :-1]) + m.norm(m.tokens(ids[:, 1:]))))
    return _plain(x, ids, labels, m) + _plain(joined, ids, labels[:, 1:], m) / 2


def _by_place(x: Tensor, ids: Tensor, labels: Tensor, m: Model) -> Tensor:
    losses = _of_tokens(x, labels, m)
    weight = torch.arange(1, LENGTH + 1).to(losses.dtype)
    return (losses * weight).sum() / weight.sum() / len(ids)


def _masked(x: Tensor, ids: Tensor, labels: Tensor, m: Model) -> Tensor:
    losses, mask = _of_tokens(x, labels, m), (ids > 4).to(x.dtype)
    return (losses * mask).sum() / mask.sum()


def _by_sequence(x: Tensor, ids: Tensor, labels: Tensor, m: Model) -> Tensor:
    losses, mask = _of_tokens(x, labels, m), (ids > 4).to(x.dtype)
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Model], Tensor]] = {
    "plain": _plain,
    "mean of tokens": lambda x, ids, labels, m: F.cross_entropy(m.head(x.mean(1)), labels[:, 0]),
    "first token": lambda x, ids, labels, m: F.cross_entropy(m.head(x[:, 0]), labels[:, 0]),
    "last token": lambda x, ids, labels, m: F.cross_entropy(m.head(x[:, -1]), labels[:, 0]),
    "shifted": lambda x, ids, labels, m: _shifted(x, labels, m),
    "shifted by two": lambda x, ids, labels, m: _shifted(x, labels, m, 2),
    "of next tokens too": _of_next_too,
    "ignored": lambda x, ids, labels, m: _plain(x, ids, labels.masked_fill(ids < 8, -100), m),
    "computed": lambda x, ids, labels, m: _plain(x, ids, torch.where(x.detach()[..., 0] > 0, labels, -100), m),
    "z": lambda x, ids, labels, m: _plain(x, ids, labels, m) + m.head(x).logsumexp(-1).square().mean() / 100,
    "activations": lambda x, ids, labels, m: _plain(x, ids, labels, m) + x.square().mean() / 100,
    "of a weight": lambda x, ids, labels, m: _plain(x, ids, labels, m) + m.places.weight.square().mean() / 100,
    "by place": _by_place,
    "masked": _masked,
    "by sequence": _by_sequence,
    "log-probabilities": lambda x, ids, labels, m: -m.head(x).log_softmax(-1).gather(-1, labels[..., None]).mean(),
    "root": lambda x, ids, labels, m: _plain(x, ids, labels, m).sqrt(),
    "perplexity": lambda x, ids, labels, m: _plain(x, ids, labels, m).exp(),
    "deviation": lambda x, ids, labels, m: _plain(x, ids, labels, m) + x.std(),
    "differences": lambda x, ids, labels, m: _plain(x, ids, labels, m) + (x[:, 1:] - x[:, :-1]).square().mean(),
}


@dataclass(frozen=True)
class Spelling:
    attention: str = "causal"
    mixing: str = "none"
    positions: str = "embedding"
    loss: str = "plain"


class Model(nn.Module):
    waves: Tensor

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.spelling = spelling
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.table, self.weight = nn.Parameter(torch.randn(LENGTH, WIDTH)), nn.Parameter(torch.rand(LENGTH))
        self.blocks = nn.ModuleList(Block(spelling.attention, spelling.mixing) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("waves", torch.randn(LENGTH, WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = POSITIONS[self.spelling.positions](self.tokens(ids), ids, self)
        for block in self.blocks:
            x = block(x)
        return LOSSES[self.spelling.loss](self.norm(x)[:, -LENGTH:], ids, labels, self)


def build(spelling: Spelling) -> Model:
    """In float64, with equal weights at every call."""
    torch.manual_seed(0)
    return Model(spelling).double()
