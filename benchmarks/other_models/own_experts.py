"""Rewritten mixtures of experts and adapters: a list of experts, batched experts, soft slots, LoRA by patching."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.other_models.own_decoders import GPT, HEADS, WIDTH, FlashBlock


class Expert(nn.Module):
    def __init__(self, hidden: int = 96) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(WIDTH, hidden, bias=False)
        self.w2 = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class DenseMixture(nn.Module):
    """Every expert runs on every token; the gate's top two of four weights are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4, bias=False), nn.ModuleList([Expert() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        values, chosen = self.gate(x).topk(2, dim=-1)
        weights = torch.zeros_like(self.gate(x)).scatter(-1, chosen, values.softmax(-1))
        return sum(expert(x) * weights[..., i, None] for i, expert in enumerate(self.experts))


class BatchedMixture(nn.Module):
    """One-hot dispatch with a capacity, experts as one einsum over [experts, d, h]."""

    def __init__(self, experts: int = 4, capacity: int = 8) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(WIDTH, experts, bias=False), capacity
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, WIDTH, 96) * 0.1),
            nn.Parameter(torch.randn(experts, 96, WIDTH) * 0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.gate(x).softmax(-1)
        first = F.one_hot(probabilities.argmax(-1), probabilities.shape[-1]).to(x)
        place = (first.cumsum(1) * first).long() - 1  # of a sequence's tokens in its expert's queue
        dispatch = (
            first[..., None]
            * F.one_hot(place.clamp(0, self.capacity - 1), self.capacity)
            * (place < self.capacity)[..., None]
        )
        slots = torch.einsum("bsec,bsd->becd", dispatch, x)
        out = torch.einsum("bech,ehd->becd", F.gelu(torch.einsum("becd,edh->bech", slots, self.up)), self.down)
        return torch.einsum("bsec,becd->bsd", dispatch * (probabilities * first)[..., None], out)


class SoftMixture(nn.Module):
    """Soft MoE: slots are softmax averages of tokens, tokens softmax averages of slots."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.experts = (
            nn.Parameter(torch.randn(WIDTH, 4, 2) * 0.1),
            nn.ModuleList([Expert() for _ in range(4)]),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum("bsd,dep->bsep", x, self.phi)
        slots = torch.einsum("bsd,bsep->bepd", x, logits.softmax(1))
        out = torch.stack([expert(slots[:, i]) for i, expert in enumerate(self.experts)], dim=1)
        return torch.einsum("bepd,bsep->bsd", out, logits.flatten(2).softmax(-1).view_as(logits))


def with_mixture(mixture: type[nn.Module]) -> nn.Module:
    """The GPT with its MLPs replaced after it is built."""
    model = GPT(FlashBlock, tied=False)
    for block in model.transformer.h:
        block.mlp = mixture()
    return model


def mixtral() -> nn.Module:
    return with_mixture(DenseMixture)


def switch() -> nn.Module:
    return with_mixture(BatchedMixture)


def soft_moe() -> nn.Module:
    return with_mixture(SoftMixture)


def lora_patched() -> nn.Module:
    """Low-rank adapters over frozen weights: each linear's forward is replaced on the instance by a closure."""
    model = GPT(FlashBlock)
    model.requires_grad_(False)

    def adapt(linear: nn.Linear, rank: int = 4) -> None:
        linear.lora_a = nn.Parameter(torch.randn(rank, linear.in_features) * 0.1)
        linear.lora_b = nn.Parameter(torch.randn(linear.out_features, rank) * 0.1)
        before = linear.forward
        linear.forward = lambda x: before(x) + x @ linear.lora_a.T @ linear.lora_b.T * 0.5

    for block in model.transformer.h:
        adapt(block.c_attn)
        adapt(block.c_proj)
    return model


class HeadByHead(nn.Module):
    """Each head a module of its own with three matrices; a Python loop joins them: how attention is first taught."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH // HEADS, bias=False) for _ in range(3))
            self.register_buffer("tril", torch.tril(torch.ones(32, 32)))

        def forward(self, x: Tensor) -> Tensor:
            s = x.shape[1]
            scores = self.query(x) @ self.key(x).transpose(-2, -1) * (WIDTH // HEADS) ** -0.5
            return F.softmax(scores.masked_fill(self.tril[:s, :s] == 0, float("-inf")), dim=-1) @ self.value(x)

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.proj = nn.ModuleList([HeadByHead.Head() for _ in range(HEADS)]), nn.Linear(WIDTH, WIDTH)
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln_1(x)
        x = x + self.proj(torch.cat([head(h) for head in self.heads], dim=-1))
        return x + self.mlp(self.ln_2(x))


def head_by_head() -> nn.Module:
    return GPT(HeadByHead, tied=False)
