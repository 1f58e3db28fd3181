"""Layers of experts in plain PyTorch, in the spellings that people use, and layers that only look like them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH = 24, 6


class Layer(nn.Module):
    """``num_experts`` of [hidden → width → hidden], ``top_k`` a token; ``way`` is how it is written."""

    def __init__(self, way: Way, hidden: int = 8, width: int = 12, num_experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.way, self.num_experts, self.top_k = way, num_experts, top_k
        self.gate = nn.Linear(hidden, num_experts)
        if way in LOOPS:
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(hidden, width), nn.GELU(), nn.Linear(width, hidden)) for _ in range(num_experts)
            )
        else:
            self.up = nn.Parameter(torch.randn(num_experts, hidden, width) * 0.3)
            self.down = nn.Parameter(torch.randn(num_experts, width, hidden) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        probs, chosen = self.gate(x).softmax(-1).topk(self.top_k, -1)
        return self.way(self, x, probs, chosen)


Way = Callable[[Layer, Tensor, Tensor, Tensor], Tensor]


def masks(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """A loop: every expert computes all, and a mask of its number weighs it."""
    y = torch.zeros_like(x)
    for number, expert in enumerate(layer.experts):
        y = y + expert(x) * (probs * (chosen == number)).sum(-1, keepdim=True)
    return y


def columns(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """A loop over the columns of gates that are zero but for the chosen."""
    gates = probs.new_zeros(*probs.shape[:-1], layer.num_experts).scatter(-1, chosen, probs)
    return sum(expert(x) * gates[..., number, None] for number, expert in enumerate(layer.experts))


def picked(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """What all experts give, stacked, of which the chosen are picked."""
    made = torch.stack([expert(x) for expert in layer.experts], -2)
    return (made.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, x.shape[-1])) * probs.unsqueeze(-1)).sum(-2)


def stacked(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Every expert on all tokens, as two products of stacks."""
    gates = probs.new_zeros(*probs.shape[:-1], layer.num_experts).scatter(-1, chosen, probs)
    return _weighted(layer, F.gelu(torch.einsum("bsd,edh->bseh", x, layer.up)), gates)


def _weighted(layer: Layer, inner: Tensor, gates: Tensor) -> Tensor:
    return torch.einsum("bsed,bse->bsd", torch.einsum("bseh,ehd->bsed", inner, layer.down), gates)


def copied(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """A copy of all tokens for each expert, in one dim with the experts; products by bmm."""
    gates = F.one_hot(chosen, layer.num_experts).to(x.dtype).mul(probs.unsqueeze(-1)).sum(-2).flatten(0, 1)
    copies = x.flatten(0, 1).repeat(layer.num_experts, 1).view(layer.num_experts, -1, x.shape[-1])
    made = torch.bmm(F.gelu(torch.bmm(copies, layer.up)), layer.down).flatten(0, 1) * gates.t().reshape(-1, 1)
    return made.view(layer.num_experts, -1, x.shape[-1]).sum(0).view_as(x)


def looked_up(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """The matrices of its experts for each token."""
    inner = F.gelu(torch.einsum("bsd,bskdh->bskh", x, layer.up[chosen]))
    return (torch.einsum("bskh,bskhd->bskd", inner, layer.down[chosen]) * probs.unsqueeze(-1)).sum(-2)


def slots(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor, capacity: int = 3) -> Tensor:
    """GShard: one-hot places in ``capacity`` slots of each expert; what finds none is dropped."""
    x_, probs, chosen = x.flatten(0, 1), probs.flatten(0, 1), chosen.flatten(0, 1)
    mask = F.one_hot(chosen, layer.num_experts)
    before = mask.transpose(0, 1).reshape(-1, layer.num_experts).cumsum(0) - 1
    place = before.view(layer.top_k, -1, layer.num_experts).transpose(0, 1)
    kept = mask * (place < capacity)
    slot = F.one_hot((place * kept).sum(-1).clamp(max=capacity - 1), capacity).to(x.dtype)
    dispatch = torch.einsum("tke,tkc->tec", kept.to(x.dtype), slot)
    combine = torch.einsum("tk,tke,tkc->tec", probs, kept.to(x.dtype), slot)
    inner = F.gelu(torch.einsum("ecd,edh->ech", torch.einsum("tec,td->ecd", dispatch, x_), layer.up))
    return torch.einsum("tec,ecd->td", combine, torch.einsum("ech,ehd->ecd", inner, layer.down)).view_as(x)


LOOPS: tuple[Way, ...] = (masks, columns, picked)
WAYS: tuple[Way, ...] = (*LOOPS, stacked, copied, looked_up, slots)


class Net(nn.Module):
    """Tokens, a norm, ``layer`` with a residual, a head and a mean over tokens."""

    def __init__(self, layer: nn.Module, hidden: int = 8) -> None:
        super().__init__()
        self.tokens, self.norm, self.layer = nn.Embedding(VOCABULARY, hidden), nn.LayerNorm(hidden), layer
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        x = x + self.layer(self.norm(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Blocks(nn.Module):
    """Two blocks: attention and ``layer()``, each behind a norm and with a residual. ``shared``: beside a layer an MLP
    for all tokens, written behind it."""

    def __init__(self, layer: Callable[[], nn.Module], shared: bool = False, hidden: int = 8) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, hidden), nn.Linear(hidden, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block(layer(), shared, hidden) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Block(nn.Module):
    def __init__(self, layer: nn.Module, shared: bool, hidden: int) -> None:
        super().__init__()
        self.norms, self.layer = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2)), layer
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.shared = nn.Sequential(nn.Linear(hidden, 12), nn.GELU(), nn.Linear(12, hidden)) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        tokens = self.norms[1](x)
        made = self.layer(tokens)
        return x + (made if self.shared is None else made + self.shared(tokens))


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randint(VOCABULARY, (2, LENGTH), generator=generator) for key in ("input_ids", "labels")}


# ---- layers that choose, or that have equal branches or stacks, and are no experts behind a router


class ProductKeys(nn.Module):
    """A memory: the best of pairs of keys choose rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.values = nn.Linear(8, 8), nn.Embedding(16, 8)
        self.keys = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        (a, i), (b, j) = ((half @ self.keys[n].t()).topk(2, -1) for n, half in enumerate(self.query(x).chunk(2, -1)))
        scores = (a.unsqueeze(-1) + b.unsqueeze(-2)).flatten(-2)
        numbers = (i.unsqueeze(-1) * 4 + j.unsqueeze(-2)).flatten(-2)
        best, at = scores.topk(2, -1)
        return (self.values(numbers.gather(-1, at)) * best.softmax(-1).unsqueeze(-1)).sum(-2)


class SoftMixture(nn.Module):
    """A mixture of softmaxes: every branch counts, none is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.branches = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.stack([branch(x).softmax(-1) for branch in self.branches], -2)
        return (made * self.gate(x).softmax(-1).unsqueeze(-1)).sum(-2)


class SparseAttention(nn.Module):
    """Heads with matrices of their own in a stack; each query looks at its best keys alone."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(4, 8, 6) * 0.3)
        self.out, self.bias = nn.Parameter(torch.randn(4, 2, 8) * 0.3), nn.Parameter(torch.randn(4, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("bsd,hde->bhse", x, self.qkv).split(2, -1)
        scores = q @ k.transpose(-1, -2) + self.bias
        best, at = scores.topk(3, -1)
        kept = torch.full_like(scores, float("-inf")).scatter(-1, at, best)
        return torch.einsum("bhse,hed->bsd", kept.softmax(-1) @ v, self.out)


class Codebook(nn.Module):
    """The nearest vector of a table takes the place of each token, with the gradient of the token."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.out = nn.Parameter(torch.randn(16, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        nearest = F.embedding((x @ self.codes.t()).argmax(-1), self.codes)
        return self.out(x + (nearest - x).detach())


class Vocabulary(nn.Module):
    """The likeliest tokens of an inner head are read again."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.table = nn.Linear(8, VOCABULARY), nn.Embedding(VOCABULARY, 8)

    def forward(self, x: Tensor) -> Tensor:
        best, which = self.head(x).softmax(-1).topk(2, -1)
        return (self.table(which) * best.unsqueeze(-1)).sum(-2)


class SomeTokens(nn.Module):
    """Mixture of depths: the best tokens of a sequence go through an MLP, the others pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 1), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        best, at = self.gate(x).squeeze(-1).topk(3, -1)
        at = at.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        made = self.down(F.gelu(self.up(x.gather(1, at)))) * best.sigmoid().unsqueeze(-1)
        return torch.zeros_like(x).scatter(1, at, made)


class Groups(nn.Module):
    """A grouped convolution, and a maximum over channels that gates it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv1d(8, 8, 1, groups=4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        best, which = self.gate(x).max(-1, keepdim=True)
        return self.conv(x.transpose(1, 2)).transpose(1, 2) * best * (which == 0)


NO_EXPERTS: tuple[type[nn.Module], ...] = (
    ProductKeys,
    SoftMixture,
    SparseAttention,
    Codebook,
    Vocabulary,
    SomeTokens,
    Groups,
)


class Differing(Layer):
    """Branches of which the last is another function."""

    def __init__(self) -> None:
        super().__init__(masks)
        self.experts[-1][1] = nn.ReLU()


class Missing(Layer):
    """A loop that leaves out the last number."""

    def __init__(self) -> None:
        super().__init__(masks)
        del self.experts[-1]


class OfOthers(Layer):
    """Experts that read two values: the tokens, and what a linear makes of them."""

    def __init__(self) -> None:
        super().__init__(stacked)
        self.other = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        probs, chosen = self.gate(self.other(x)).softmax(-1).topk(self.top_k, -1)
        inner = torch.einsum("bsd,edh->bseh", x, self.up) * torch.einsum("bsd,edh->bseh", self.other(x), self.up)
        gates = F.one_hot(chosen, self.num_experts).to(x.dtype).mul(probs.unsqueeze(-1)).sum(-2)
        return _weighted(self, inner, gates)


def small() -> nn.Module:
    """For the command line: four experts, in a loop."""
    return Net(Layer(masks))


def not_understood() -> nn.Module:
    """For the command line."""
    return Net(OfOthers())
