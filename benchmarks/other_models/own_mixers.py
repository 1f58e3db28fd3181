"""Rewritten models without softmax attention: retention, state spaces, long convolutions, recurrences, MLPs."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LAYERS = 96, 64, 4, 2


class Tower(nn.Module):
    """Embedding, pre-norm residual blocks of a mixer and an MLP, head."""

    def __init__(self, mixer: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block(mixer()) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Block(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer, self.norm1, self.norm2 = mixer, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Retention(nn.Module):
    """(Q K^T ⊙ D) V with a decay D of each head, group norm over heads and a swish gate."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.g, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))
        self.group_norm = nn.GroupNorm(HEADS, WIDTH)
        self.register_buffer("decay", torch.log(1 - 2 ** (-5 - torch.arange(HEADS, dtype=torch.float))))

    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        q, k, v = (f(x).view(b, s, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        n = torch.arange(s, device=x.device)
        distance = (n[:, None] - n[None, :]).to(x.dtype)
        mask = torch.exp(distance * self.decay[:, None, None]) * (distance >= 0)
        mask = mask / mask.sum(-1, keepdim=True).sqrt()
        y = ((q @ k.transpose(-1, -2)) / math.sqrt(c // HEADS) * mask) @ v
        y = self.group_norm(y.transpose(1, 2).reshape(b * s, c)).view(b, s, c)
        return self.o(F.silu(self.g(x)) * y)


class DiagonalStateSpace(nn.Module):
    """S4D: y = k * u + D u with k(t) = 2 Re Σ C exp(A t Δ) (exp(A Δ) - 1) / A, by FFT."""

    def __init__(self, states: int = 8) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.rand(WIDTH) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        self.log_a_real = nn.Parameter(torch.log(0.5 * torch.ones(WIDTH, states)))
        self.a_imag = nn.Parameter(math.pi * torch.arange(states).repeat(WIDTH, 1).float())
        self.c = nn.Parameter(torch.view_as_real(torch.randn(WIDTH, states, dtype=torch.cfloat)))
        self.skip, self.output = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, u: Tensor) -> Tensor:
        length, step = u.shape[1], self.log_step.exp()
        a = -self.log_a_real.exp() + 1j * self.a_imag
        scaled = a * step[:, None]
        c = torch.view_as_complex(self.c) * (scaled.exp() - 1.0) / a
        kernel = 2 * torch.einsum("hn,hnl->hl", c, torch.exp(scaled[..., None] * torch.arange(length))).real
        spectrum = torch.fft.rfft(u.mT, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        y = torch.fft.irfft(spectrum, n=2 * length)[..., :length].mT + u * self.skip
        return F.glu(self.output(F.gelu(y)), dim=-1)


class Hyena(nn.Module):
    """Three projections, a short depthwise convolution, and a long filter that a small MLP draws over the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.short = nn.Conv1d(3 * WIDTH, 3 * WIDTH, 3, padding=2, groups=3 * WIDTH)
        self.filter = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("decay", torch.linspace(0.3, 3.0, WIDTH))

    def forward(self, u: Tensor) -> Tensor:
        length = u.shape[1]
        q, k, v = self.short(self.in_proj(u).transpose(1, 2))[..., :length].chunk(3, dim=1)
        t = torch.linspace(0, 1, length, dtype=u.dtype, device=u.device)[:, None]
        places = torch.cat([t, *(f(2 * math.pi * i * t) for i in (1, 2) for f in (torch.sin, torch.cos))], -1)
        h = (self.filter(places) * torch.exp(-t * self.decay)).transpose(0, 1)
        mixed = k * v
        spectrum = torch.fft.rfft(mixed, n=2 * length) * torch.fft.rfft(h, n=2 * length)
        y = torch.fft.irfft(spectrum, n=2 * length)[..., :length] + mixed * self.bias[:, None]
        return self.out_proj((q * y).transpose(1, 2))


class TimeMix(nn.Module):
    """RWKV's token shift and its weighted sum of the past, a step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(3, WIDTH))
        self.decay, self.first = nn.Parameter(torch.randn(WIDTH) * 0.1), nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.key, self.value, self.receptance, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        before = self.shift(x)
        k, v, r = (
            f(x * m + before * (1 - m)) for f, m in zip((self.key, self.value, self.receptance), self.mix, strict=True)
        )
        decay, top, bottom, out = -torch.exp(self.decay), torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), []
        for step in range(x.shape[1]):
            now = torch.exp(self.first + k[:, step])
            out.append((top + now * v[:, step]) / (bottom + now))
            top = torch.exp(decay) * top + torch.exp(k[:, step]) * v[:, step]
            bottom = torch.exp(decay) * bottom + torch.exp(k[:, step])
        return self.output(torch.sigmoid(r) * torch.stack(out, dim=1))


class RandomFeatures(nn.Module):
    """FAVOR+: softmax attention by positive random features, causal by cumulative sums."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("projection", torch.randn(12, WIDTH // HEADS))

    def features(self, x: Tensor) -> Tensor:
        x = x * x.shape[-1] ** -0.25
        return torch.exp(x @ self.projection.mT - x.square().sum(-1, keepdim=True) / 2) + 1e-4

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = self.features(q), self.features(k)
        context = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(dim=2)
        y = torch.einsum("bhsf,bhsfd->bhsd", q, context) / (q * k.cumsum(2)).sum(-1, keepdim=True)
        return self.out(y.transpose(1, 2).flatten(2))


class SpatialGate(nn.Module):
    """gMLP: half of the channels gate the other half through a causal map over positions."""

    def __init__(self, length: int = 16) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.weight, self.bias = nn.Parameter(torch.randn(length, length) * 0.1), nn.Parameter(torch.ones(length))

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.up(x)).chunk(2, dim=-1)
        s = x.shape[1]
        gate = torch.tril(self.weight[:s, :s]) @ self.norm(v) + self.bias[:s, None]
        return self.down(u * gate)


def retnet() -> nn.Module:
    return Tower(Retention)


def s4d() -> nn.Module:
    return Tower(DiagonalStateSpace)


def hyena() -> nn.Module:
    return Tower(Hyena)


def rwkv() -> nn.Module:
    return Tower(TimeMix)


def performer() -> nn.Module:
    return Tower(RandomFeatures)


def g_mlp() -> nn.Module:
    return Tower(SpatialGate)
