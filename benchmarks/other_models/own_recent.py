"""Rewritten decoders of recent papers: keys of other layers, two softmaxes, unit vectors, patches of bytes, a delta
rule, further tokens, and experts that are applied several times.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LENGTH, HIDDEN = 96, 64, 4, 16, 96
SIZE = WIDTH // HEADS


class Attention(nn.Module):
    """``own_keys``: whether it makes keys and values, or is given those of another layer."""

    def __init__(self, own_keys: bool = True) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH, bias=False) if own_keys else None

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        return k, v

    def forward(self, x: Tensor, given: tuple[Tensor, Tensor] | None = None) -> Tensor:
        k, v = self.keys(x) if given is None else given
        q = self.q(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, inner = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * inner)


class Block(nn.Module):
    def __init__(self, attention: nn.Module | None = None, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.attention, self.mlp = attention or Attention(), mlp or GatedMLP()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor, *given: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norms[0](x), *given)
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """Tokens and positions, ``blocks``, a head, the mean loss over labels."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def embedded(self, input_ids: Tensor) -> Tensor:
        return self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.through(self.embedded(input_ids)), labels)


class CrossLayer(Decoder):
    """Every second layer attends to the keys and values of the layer before."""

    def through(self, x: Tensor) -> Tensor:
        for own, other in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            given = own.attention.keys(own.norms[0](x))
            x = other(own(x, given), given)
        return x


def cross_layer() -> nn.Module:
    return CrossLayer(*(Block(Attention(i % 2 == 0)) for i in range(4)))


class Differential(nn.Module):
    """The difference of two softmaxes, a norm of each head, a weight that is learned as products of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.v, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.weights, self.norm = nn.Parameter(torch.randn(4, SIZE) * 0.1), nn.RMSNorm(SIZE, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k = (part(x).view(b, s, 2 * HEADS, SIZE).transpose(1, 2) for part in (self.q, self.k))
        v = self.v(x).view(b, s, HEADS, SIZE).transpose(1, 2)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(SIZE)).masked_fill(
            torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1), float("-inf")
        )
        first, second = scores.softmax(-1).view(b, HEADS, 2, s, s).unbind(2)
        a, b_, c, d = self.weights
        weight = torch.exp((a * b_).sum()) - torch.exp((c * d).sum()) + 0.2
        return self.out((self.norm((first - weight * second) @ v) * 0.8).transpose(1, 2).flatten(2))


def differential() -> nn.Module:
    return Decoder(Block(Differential()), Block(Differential()))


class UnitBlock(nn.Module):
    """Rows of matrices and hidden states are unit vectors; each step moves along the sphere."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(4))
        self.up, self.down = nn.Parameter(torch.randn(HIDDEN, WIDTH)), nn.Parameter(torch.randn(WIDTH, HIDDEN))
        self.scale, self.inner = nn.Parameter(torch.ones(SIZE)), nn.Parameter(torch.ones(HIDDEN))
        self.step = nn.Parameter(torch.full((2, WIDTH), 0.05))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, unit(w)).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(unit(q) * self.scale, unit(k), v, is_causal=True, scale=math.sqrt(SIZE))
        x = unit(x + self.step[0] * (unit(F.linear(y.transpose(1, 2).flatten(2), unit(self.o, 0))) - x))
        y = F.linear(F.silu(F.linear(x, unit(self.up)) * self.inner), unit(self.down, 0))
        return unit(x + self.step[1] * (unit(y) - x))


def unit(x: Tensor, dim: int = -1) -> Tensor:
    return F.normalize(x, dim=dim)


def unit_vectors() -> nn.Module:
    return Decoder(UnitBlock(), UnitBlock())


class PatchesOfBytes(Decoder):
    """A model of patches of 4 bytes, then one of the bytes of each patch."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.join, self.part = nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.local = nn.ModuleList(Block() for _ in range(2))

    def through(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        before = F.pad(x.view(b, s // 4, 4 * WIDTH)[:, :-1], (0, 0, 1, 0))
        patches = self.part(super().through(self.join(before)))
        x = x.view(b * s // 4, 4, WIDTH) + patches.view(b * s // 4, 4, WIDTH)
        for block in self.local:
            x = block(x)
        return x.view(b, s, WIDTH)


def patches_of_bytes() -> nn.Module:
    return PatchesOfBytes()


class Delta(nn.Module):
    """A state of each head that forgets by a gate and is corrected by the error of its prediction, token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.rate, self.gate = nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, SIZE)) for part in self.qkv(x).chunk(3, -1))
        k, rate, gate = unit(k), self.rate(x).sigmoid(), self.gate(x).sigmoid()
        state, out = x.new_zeros(len(x), HEADS, SIZE, SIZE), []
        for t in range(x.shape[1]):
            state = state * gate[:, t, :, None, None]
            error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], error * rate[:, t, :, None])
            out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        return self.out(torch.stack(out, 1).flatten(2))


def delta_rule() -> nn.Module:
    return Decoder(Block(Delta()), Block(Delta()))


class FurtherTokens(Decoder):
    """A block more predicts the token after the next, from the state and the next token's embedding; one head."""

    def __init__(self) -> None:
        super().__init__(Block(), Block())
        self.further, self.join = Block(), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.through(self.embedded(input_ids))
        joined = torch.cat([self.norm(x[:, :-1]), self.tokens(labels[:, :-1])], -1)
        return self.loss(x, labels) + 0.3 * self.loss(self.further(self.join(joined)), labels[:, 1:])


def further_tokens() -> nn.Module:
    return FurtherTokens()


class Experts(nn.Module):
    """Sigmoid scores, a bias that only chooses, matrices of experts by their index, an expert for all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = nn.Linear(WIDTH, 4, bias=False), GatedMLP()
        self.register_buffer("bias", torch.tensor([0.1, -0.1, 0.0, 0.05]))
        self.up, self.down = (
            nn.Parameter(torch.randn(4, WIDTH, 64) * 0.1),
            nn.Parameter(torch.randn(4, 32, WIDTH) * 0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        scores = self.router(rows).sigmoid()
        chosen = (scores + self.bias).topk(2, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights, out = 2.5 * weights / weights.sum(-1, keepdim=True), torch.zeros_like(rows)
        for expert in range(4):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            if token.numel() == 0:
                continue
            gate, inner = (rows[token] @ self.up[expert]).chunk(2, -1)
            out.index_add_(0, token, (F.silu(gate) * inner) @ self.down[expert] * weights[token, place, None])
        return (out + self.shared(rows)).view_as(x)


def experts_by_index() -> nn.Module:
    return Decoder(Block(mlp=Experts()), Block(mlp=Experts()))


class Repeated(Decoder):
    """One block, three times."""

    def through(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.blocks[0](x)
        return x


def repeated_experts() -> nn.Module:
    return Repeated(Block(mlp=Experts()))
