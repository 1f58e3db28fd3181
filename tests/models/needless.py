"""Models of which a planner easily computes more than its share on every rank, or says more than it must.

Each ends in a loss over features [b, s, w] made from ids and labels [b, s].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LENGTH, WIDTH, HEADS, SIZE, CLASSES = 2, 6, 16, 4, 4, 32


def batch(rows: int = BATCH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(CLASSES, (rows, LENGTH), generator=generator) for name in ("ids", "labels")}


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Layered(nn.Module):
    """Two residual layers, each made by ``layer``, between an embedding and a head with the loss of ``loss``."""

    def __init__(self, layer: Callable[[], nn.Module], loss: Callable[..., Tensor] = token_loss) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.loss(self.head(x), labels)


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(heads_of(q), heads_of(k), heads_of(v)).transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


# ---- biases put together at every call


class JoinedBiases(nn.Module):
    """One fused weight; keys have no bias, and those of queries and values are parameters of their own."""

    def __init__(self, zeros: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))
        self.k_bias = nn.Buffer(torch.zeros(WIDTH), persistent=False)
        self.zeros = zeros

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, self.zeros(self.k_bias), self.v_bias))
        return self.out(attend(*F.linear(x, self.qkv.weight, bias).chunk(3, -1)))


class JoinedBiasesOfFive(JoinedBiases):
    """As some of that family do: reshaped to [b, s, 3, heads, size] and unbound."""

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, self.zeros(self.k_bias), self.v_bias))
        fused = F.linear(x, self.qkv.weight, bias).reshape(BATCH, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = fused.unbind(0)
        scores = (q * SIZE**-0.5) @ k.transpose(-2, -1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(BATCH, LENGTH, -1))


# ---- convolutions between batch norms


class ConvolutionModule(nn.Module):
    """Pointwise, gated, depthwise, normed over the batch, swish, pointwise."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv1d(WIDTH, 4 * WIDTH, 1), nn.Conv1d(2 * WIDTH, WIDTH, 1)
        self.depthwise = nn.Conv1d(2 * WIDTH, 2 * WIDTH, 3, padding=1, groups=2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        if frozen:
            self.norm.eval()
        for held in (self.norm.running_mean, self.norm.running_var):
            assert held is not None
            held.uniform_(0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.wide(x.transpose(1, 2)), dim=1)
        return self.narrow(F.silu(self.norm(self.depthwise(y)))).transpose(1, 2)


# ---- losses


class Weighted(nn.Module):
    """``way(weight, logits, labels)`` with a weight for each class."""

    def __init__(self, way: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.linspace(0.5, 2.0, CLASSES))
        self.way = way

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.way(self.weight.to(logits.dtype), logits, labels)


LOSSES: dict[str, Callable[[], Any]] = {
    "four dims": lambda: (
        lambda x, y: F.cross_entropy(x.transpose(1, 2).reshape(BATCH, CLASSES, 2, -1), y.view(BATCH, 2, -1))
    ),
    "nll in the middle": lambda: lambda x, y: F.nll_loss(x.transpose(1, 2).log_softmax(1), y),
    "weighted": lambda: Weighted(lambda w, x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), weight=w)),
    "weighted, some ignored": lambda: Weighted(
        lambda w, x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), weight=w, ignore_index=5)
    ),
    "weighted, smoothed": lambda: Weighted(
        lambda w, x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), weight=w, label_smoothing=0.1)
    ),
    "weighted, in the middle": lambda: Weighted(lambda w, x, y: F.cross_entropy(x.transpose(1, 2), y, weight=w)),
    "weighted, summed": lambda: Weighted(
        lambda w, x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), weight=w, reduction="sum")
    ),
    "weighted, each": lambda: Weighted(
        lambda w, x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), weight=w, reduction="none").pow(2).mean()
    ),
}


# ---- heads in a loop


class Head(nn.Module):
    """One head with projections of its own, as taught: a mask of a buffer, scores, softmax."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, SIZE, bias=bias) for _ in range(3))
        self.past = nn.Buffer(torch.ones(LENGTH, LENGTH).tril())

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1) * SIZE**-0.5
        scores = scores.masked_fill(self.past[:LENGTH, :LENGTH] == 0, float("-inf"))
        return scores.softmax(-1) @ self.value(x)


class HeadModules(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.out = nn.ModuleList(Head(bias) for _ in range(HEADS)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], dim=-1))


class HeadWeights(nn.Module):
    """Lists of plain matrices, a fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.ParameterList(nn.Parameter(torch.randn(WIDTH, SIZE)) for _ in range(HEADS)) for _ in range(3)
        )
        self.o = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = [
            F.scaled_dot_product_attention(x @ q, x @ k, x @ v) for q, k, v in zip(self.q, self.k, self.v, strict=True)
        ]
        return torch.cat(parts, -1) @ self.o


class StackedWeights(nn.Module):
    """One tensor [heads, w, size] for each of q, k, v, and a loop that picks from it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(HEADS, WIDTH, SIZE)) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for h in range(HEADS):
            q, k, v = x @ self.q[h], x @ self.k[h], x @ self.v[h]
            parts.append((q @ k.mT).softmax(-1) @ v)
        return self.out(torch.cat(parts, -1))


class SlicedHeads(nn.Module):
    """One projection each for all heads; the loop takes each head's features."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        parts = []
        for h in range(HEADS):
            at = slice(h * SIZE, (h + 1) * SIZE)
            parts.append((q[..., at] @ k[..., at].mT).softmax(-1) @ v[..., at])
        return self.out(torch.cat(parts, -1))


class SummedHeads(nn.Module):
    """Each head has an output projection of its own; their results are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(HEADS))
        self.outs = nn.ModuleList(nn.Linear(SIZE, WIDTH, bias=False) for _ in range(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for head, out in zip(self.heads, self.outs, strict=True):
            y = y + out(head(x))
        return y


class StackedHeads(nn.Module):
    """Heads stacked in a dim of their own, then flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out = nn.ModuleList(Head() for _ in range(HEADS)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.stack([head(x) for head in self.heads], dim=2).flatten(2))


LOOPS: dict[str, Callable[[], nn.Module]] = {
    "modules": HeadModules,
    "modules with biases": lambda: HeadModules(bias=True),
    "weights": HeadWeights,
    "stacked weights": StackedWeights,
    "sliced": SlicedHeads,
    "summed": SummedHeads,
    "stacked heads": StackedHeads,
}


# ---- products of activations that are no attention


class Mixing(nn.Module):
    """``way(q, k, v)`` over three projections [b, s, w] of what comes in; gives [b, s, w]."""

    def __init__(self, way: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.parts, self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, WIDTH)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.way(*(part(x) for part in self.parts)))


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = heads_of(q).softmax(-1), heads_of(k).softmax(-2), heads_of(v)
    return (q @ (k.mT @ v)).transpose(1, 2).flatten(2)


def covariance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    centred = k - k.mean(1, keepdim=True)
    return q + v @ (centred.mT @ centred)


def scan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A state-space layer written as a product with decays over the past."""
    decay = F.logsigmoid(heads_of(k).mean(-1)).cumsum(-1)
    past = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
    return (past @ heads_of(v) * heads_of(q)).transpose(1, 2).flatten(2)


NO_ATTENTION = {f.__name__: f for f in (linear_attention, covariance, scan)}
NO_ATTENTION |= {
    "grouped": lambda q, k, v: (heads_of(q) @ heads_of(k).mT @ heads_of(v)).transpose(1, 2).flatten(2),
    "mixing_einsum": lambda q, k, v: torch.einsum("bsw,btw,btv->bsv", q, k.sigmoid(), v),
    "similarity": lambda q, k, v: (
        v * (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).log_softmax(-1).diagonal(dim1=1, dim2=2)[..., None]
    ),
}


def by_exponentials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raised = torch.einsum("bhsd,bhtd->bhst", heads_of(q), heads_of(k)).exp()
    weights = raised / raised.sum(-1, keepdim=True)
    return torch.einsum("bhst,bhtd->bshd", weights, heads_of(v)).flatten(2)


ATTENTION = {f.__name__: f for f in (by_exponentials, attend)}
ATTENTION |= {
    "by_hand": lambda q, k, v: ((heads_of(q) @ heads_of(k).mT).softmax(-1) @ heads_of(v)).transpose(1, 2).flatten(2),
}
