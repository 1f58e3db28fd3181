"""Parts of the models that are drawn: norms, positions, attention, MLPs and experts, as people write them.

b: sequences, s: positions, h: width, n: heads, k: key heads, d: width of a head, e: experts
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh}


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def norm(kind: str, width: int) -> nn.Module:
    return RMSNorm(width) if kind == "rms" else nn.LayerNorm(width)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions over [b, n, s, d]: pairs of d turn by an angle that grows with s."""
    half = x.shape[-1] // 2
    rates = 1.0 / 100.0 ** (torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, x[..., 2 * half :]], dim=-1)


class Attention(nn.Module):
    """q from ``x`` [b, s, h], k and v from ``memory``; ``given``: the fields of ``models.FIELDS``."""

    def __init__(self, given: dict[str, Any], *, causal: bool) -> None:
        super().__init__()
        self.given, self.causal = given, causal
        self.n, self.d = given["heads"], given["head_width"]
        self.k = self.n if given["key_heads"] == "all" else 1 if given["key_heads"] == "one" else max(1, self.n // 2)
        width, bias = given["width"], given["bias"]
        self.sizes = [self.n * self.d, self.k * self.d, self.k * self.d]
        if given["qkv"] == "fused":
            self.qkv = nn.Linear(width, sum(self.sizes), bias=bias)
        else:
            self.q, self.key, self.v = (nn.Linear(width, size, bias=bias) for size in self.sizes)
        self.out = nn.Linear(self.n * self.d, width, bias=bias)
        if given["positions"] == "relative":
            self.table = nn.Embedding(2 * given["length"] + 1, self.n)

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor | None = None) -> Tensor:
        """``seen`` [b, 1, s, s]: the keys that a position reads."""
        if self.given["qkv"] == "fused" and memory is x:
            q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        elif self.given["qkv"] == "fused":
            q, (k, v) = self.qkv(x).split(self.sizes, dim=-1)[0], self.qkv(memory).split(self.sizes, dim=-1)[1:]
        else:
            q, k, v = self.q(x), self.key(memory), self.v(memory)
        q, k, v = (y.unflatten(-1, (-1, self.d)).transpose(1, 2) for y in (q, k, v))
        if self.given["positions"] == "rotary":
            q, k = rotated(q), rotated(k)
        if self.k != self.n:
            k, v = (y.repeat_interleave(self.n // self.k, dim=1) for y in (k, v))
        made = self._spelled(q, k, v, seen) if self._is_spelled() else self._sdpa(q, k, v, seen)
        return self.out(made.transpose(1, 2).flatten(2))

    def _is_spelled(self) -> bool:
        return self.given["attention"] == "spelled" or self.given["positions"] in ("relative", "alibi")

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        p = self.given["dropout"] if self.training else 0.0
        if seen is not None:
            before = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
            seen = seen & before if self.causal else seen
            return F.scaled_dot_product_attention(q, k, v, seen, dropout_p=p)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=p)

    def _spelled(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.d)
        far = torch.arange(k.shape[2], device=q.device) - torch.arange(q.shape[2], device=q.device)[:, None]
        if self.given["positions"] == "relative":
            scores = scores + self.table(
                far.clamp(-self.given["length"], self.given["length"]) + self.given["length"]
            ).permute(2, 0, 1)
        if self.given["positions"] == "alibi":
            slopes = 2.0 ** -torch.arange(1, self.n + 1, dtype=q.dtype, device=q.device)
            scores = scores - slopes[:, None, None] * far.abs()
        if self.causal:
            scores = scores.masked_fill(far > 0, float("-inf"))
        if seen is not None:
            scores = scores.masked_fill(~seen, float("-inf"))
        return F.dropout(scores.softmax(-1), self.given["dropout"], self.training) @ v


class MLP(nn.Module):
    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        width, inner, bias = given["width"], given["inner"], given["bias"]
        self.kind, self.act = given["mlp"], ACTIVATIONS[given["activation"]]
        self.up = nn.Linear(width, inner * (2 if self.kind == "gated_fused" else 1), bias=bias)
        if self.kind == "gated":
            self.gate = nn.Linear(width, inner, bias=bias)
        self.norm = norm(given["norm"], inner) if given["inner_norm"] else nn.Identity()
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gated":
            return self._down(self.act(self.gate(x)) * self.up(x))
        if self.kind == "gated_fused":
            gate, up = self.up(x).chunk(2, dim=-1)
            return self._down(self.act(gate) * up)
        return self._down(self.act(self.up(x)))

    def _down(self, x: Tensor) -> Tensor:
        return self.down(self.norm(x))


class Experts(nn.Module):
    """The two best of four experts for each token: rows by data, all of them weighted, or stacked matrices.

    With a ``capacity`` stacked experts have so many slots for the tokens of each sequence, and drop the others.
    ``skips_empty``: an expert without tokens is not called, and the last one gets few. With steady ``routing`` the
    place of a token decides nearly alone, by gaps that no rounding of the scores bridges.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.kind, width, inner = given["experts"], given["width"], given["inner"]
        self.capacity, self.skips_empty = given["capacity"], given["skips_empty"]
        self.is_steady = given["routing"] == "steady"
        self.router = nn.Linear(width, 4, bias=False)
        if self.kind == "stacked":
            self.up = nn.Parameter(torch.randn(4, width, inner) / width**0.5)
            self.down = nn.Parameter(torch.randn(4, inner, width) / inner**0.5)
        else:
            self.each = nn.ModuleList(MLP(given) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "stacked" and self.capacity is not None:
            return self._by_slots(x, self.capacity)
        rows = x.flatten(0, 1)
        scores = self.router(rows)
        if self.skips_empty:
            scores = scores - 2.0 * (torch.arange(4, device=x.device) == 3).to(scores.dtype)
        weights, chosen = self._chosen(scores.softmax(-1), x)
        if self.kind == "rows":
            made = torch.zeros_like(rows)
            for number, expert in enumerate(self.each):
                row, place = torch.where(chosen == number)
                if self.skips_empty and row.numel() == 0:
                    continue
                made = made.index_add(0, row, expert(rows[row]) * weights[row, place, None])
            return made.view_as(x)
        share = torch.zeros(len(rows), 4, dtype=x.dtype, device=x.device).scatter(1, chosen, weights)
        if self.kind == "stacked":
            inner = F.gelu(torch.einsum("th,ehi->eti", rows, self.up))
            return torch.einsum("eti,eih,te->th", inner, self.down, share).view_as(x)
        made = [share[:, i, None] * expert(rows) for i, expert in enumerate(self.each)]
        return torch.stack(made).sum(0).view_as(x)

    def _chosen(self, probs: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of each token. ``probs``: with the dims of ``x``, or of its rows."""
        if not self.is_steady:
            return probs.topk(2, dim=-1)
        place, expert = torch.arange(x.shape[1], device=x.device)[:, None], torch.arange(4, device=x.device)
        liked = 2.0 * (place % 4 == expert) + 4.0 * ((place + place // 4 + 1) % 4 == expert)
        chosen = (probs.view(*x.shape[:2], 4) + liked.to(probs.dtype)).topk(2, dim=-1).indices
        chosen = chosen.view(*probs.shape[:-1], 2)
        return probs.gather(-1, chosen), chosen

    def _by_slots(self, x: Tensor, capacity: int) -> Tensor:
        """[b, s, h]: slots [b, e, c, h] of each sequence, as in GShard: all first choices come before all second ones.

        Slots are of each sequence: which tokens find none does not depend on the size of a microbatch.
        """
        weights, chosen = self._chosen(self.router(x).softmax(-1), x)
        mask = F.one_hot(chosen, 4)  # [b, s, 2, e]
        place = (mask.transpose(1, 2).flatten(1, 2).cumsum(1) - 1).unflatten(1, (2, -1)).transpose(1, 2)
        slot = F.one_hot(place.masked_fill(mask == 0, capacity).clamp(max=capacity), capacity + 1)
        slot = slot[..., :capacity].to(x.dtype)  # [b, s, 2, e, c]
        inner = F.gelu(torch.einsum("bech,ehi->beci", torch.einsum("bskec,bsh->bech", slot, x), self.up))
        made = torch.einsum("beci,eih->bech", inner, self.down)
        return torch.einsum("bskec,bsk,bech->bsh", slot, weights, made)
