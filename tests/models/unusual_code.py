"""Forwards in unusual spellings: each is the body of a small model, from features [b, s, w] to features or a loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LENGTH, WIDTH, HEADS, SIZE, CLASSES = 2, 6, 16, 4, 4, 24


class Own(nn.Module):
    """Weights of the shapes that the bodies need, a head, and the body to run."""

    def __init__(self, body: Callable[[Own, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.a, self.b, self.c, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.heads3 = nn.Parameter(torch.randn(3, HEADS, WIDTH, SIZE) * 0.3)
        self.out3 = nn.Parameter(torch.randn(HEADS, SIZE, WIDTH) * 0.3)
        self.scale, self.slope = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.rand(2 * WIDTH))
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH, WIDTH) * 0.1)
        self.table = nn.Embedding(2 * LENGTH, HEADS)
        self.depthwise = nn.Conv1d(2 * WIDTH, 2 * WIDTH, 3, padding=2, groups=2 * WIDTH)
        self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.packed = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.group_norm = nn.GroupNorm(HEADS, 2 * WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        result = self.body(self, self.embedding(ids), labels)
        if result.dim() == 0:
            return result
        return F.cross_entropy(self.head(result).flatten(0, 1), labels.flatten())


def heads_of(x: Tensor) -> Tensor:
    return x.view(BATCH, LENGTH, HEADS, SIZE).transpose(1, 2)


def causal(scores: Tensor) -> Tensor:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)


def five_dim_einsum(m: Own, x: Tensor, _: Tensor) -> Tensor:
    q, k, v = torch.einsum("bsw,thwd->tbhsd", x, m.heads3)
    weights = causal(torch.einsum("bhqd,bhkd->bhqk", q, k)).softmax(-1)
    return x + torch.einsum("bhqk,bhkd,hdw->bqw", weights, v, m.out3)


def ellipsis_einsum(m: Own, x: Tensor, _: Tensor) -> Tensor:
    q, k, v = (heads_of(torch.einsum("...w,ow->...o", x, w.weight)) for w in (m.a, m.b, m.c))
    weights = causal(torch.einsum("...qd,...kd->...qk", q, k)).softmax(-1)
    return x + m.o((weights @ v).transpose(1, 2).flatten(2))


def by_hand_norm(m: Own, x: Tensor, _: Tensor) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * m.scale
    y = F.normalize(y, dim=-1)
    y = (y - y.mean(-1, keepdim=True)) / torch.sqrt(y.var(-1, keepdim=True, unbiased=False) + 1e-5)
    deviation, mean = torch.std_mean(y, dim=-1, keepdim=True)
    return x + m.narrow(F.gelu(m.wide((y - mean) / (deviation + 1e-5))))


def complex_rotary(m: Own, x: Tensor, _: Tensor) -> Tensor:
    angles = torch.outer(
        torch.arange(LENGTH, dtype=torch.float64), torch.linspace(0.1, 1.0, SIZE // 2, dtype=torch.float64)
    )
    turn = torch.polar(torch.ones_like(angles), angles)

    def turned(y: Tensor) -> Tensor:
        pairs = torch.view_as_complex(heads_of(y).reshape(BATCH, HEADS, LENGTH, SIZE // 2, 2))
        return torch.view_as_real(pairs * turn).flatten(3)

    attended = F.scaled_dot_product_attention(turned(m.a(x)), turned(m.b(x)), heads_of(m.c(x)), is_causal=True)
    return x + m.o(attended.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))


def rolled_rotary(m: Own, x: Tensor, _: Tensor) -> Tensor:
    positions = torch.arange(LENGTH, dtype=x.dtype, device=x.device)[:, None].repeat(1, SIZE)
    sin, cos = positions.sin(), positions.cos()

    def turned(y: Tensor) -> Tensor:
        half = torch.stack((-y[..., 1::2], y[..., ::2]), -1).reshape(y.shape)
        return y * cos + half * sin

    q, k, v = (heads_of(w(x)) for w in (m.a, m.b, m.c))
    weights = causal(turned(q).matmul(turned(k).mT) / SIZE**0.5).softmax(-1)
    return x + m.o((weights @ v).permute(0, 2, 1, 3).contiguous().view(BATCH, LENGTH, -1))


def relative_bias(m: Own, x: Tensor, _: Tensor) -> Tensor:
    at = torch.arange(LENGTH, device=x.device)
    bias = m.table((at[:, None] - at[None]).clamp(-LENGTH, LENGTH - 1) + LENGTH).permute(2, 0, 1)
    q, k, v = (heads_of(w(x)) for w in (m.a, m.b, m.c))
    weights = torch.softmax(
        torch.baddbmm(bias.repeat(BATCH, 1, 1), q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)), -1
    )
    attended = torch.bmm(weights, v.reshape(BATCH * HEADS, LENGTH, SIZE)).view(BATCH, HEADS, LENGTH, SIZE)
    return x + m.o(attended.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))


def alibi(m: Own, x: Tensor, _: Tensor) -> Tensor:
    slopes = torch.tensor([2.0**-i for i in range(1, HEADS + 1)], dtype=x.dtype, device=x.device)
    bias = slopes[:, None, None] * -torch.arange(LENGTH, device=x.device).flip(0)
    q, k, v = (heads_of(w(x)) for w in (m.a, m.b, m.c))
    return x + m.o((causal(q @ k.transpose(-1, -2) + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))


def chunks_and_gates(m: Own, x: Tensor, _: Tensor) -> Tensor:
    gate, up = m.wide(x).chunk(2, -1)
    left, right = torch.tensor_split(m.narrow(F.glu(torch.cat([m.wide(x), m.wide(x)], -1))), 2, dim=-1)
    first, *rest = torch.unbind(torch.stack([left, right], 2), 2)
    return x + m.o(F.silu(gate) * up) + torch.cat([rest[0], first], -1)


def shared_keys_by_expand(m: Own, x: Tensor, _: Tensor) -> Tensor:
    q = heads_of(m.a(x))
    k, v = (w(x)[..., : 2 * SIZE].view(BATCH, LENGTH, 2, SIZE).transpose(1, 2) for w in (m.b, m.c))
    k, v = (y[:, :, None].expand(-1, -1, HEADS // 2, -1, -1).reshape(BATCH, HEADS, LENGTH, SIZE) for y in (k, v))
    return x + m.o((causal(q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


def repeated_keys(m: Own, x: Tensor, _: Tensor) -> Tensor:
    q = heads_of(m.a(x))
    k, v = (w(x).narrow(-1, 0, 2 * SIZE).unflatten(-1, (2, SIZE)).transpose(1, 2) for w in (m.b, m.c))
    k, v = k.repeat_interleave(2, 1), torch.repeat_interleave(v, 2, dim=1)
    return x + m.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def torch_attention(m: Own, x: Tensor, _: Tensor) -> Tensor:
    y, _weights = m.packed(x, x, x, need_weights=True)
    z, _nothing = m.packed(y, y, y, need_weights=False)
    return x + z


def convolutions(m: Own, x: Tensor, _: Tensor) -> Tensor:
    y = m.conv(x.transpose(1, 2))
    y = F.prelu(m.depthwise(y)[..., :LENGTH], m.slope)
    y = m.group_norm(y) + F.pad(y, (1, 0))[..., :-1] + y.cumsum(-1).roll(1, -1)
    return x + m.narrow(y.transpose(1, 2))


def bilinear_and_products(m: Own, x: Tensor, _: Tensor) -> Tensor:
    y = F.bilinear(x, m.a(x), m.square)
    rows = torch.outer(m.scale, m.scale) @ m.scale
    z = torch.addmm(m.a.bias, x.flatten(0, 1), m.b.weight.t(), beta=0.5, alpha=2).view_as(x)
    return y + torch.tensordot(z, m.c.weight, dims=([2], [1])) + rows + torch.inner(x, m.o.weight)


def written_in_place(m: Own, x: Tensor, _: Tensor) -> Tensor:
    y = torch.empty(BATCH, LENGTH, 2 * WIDTH, dtype=x.dtype, device=x.device)
    y[..., :WIDTH] = m.a(x)
    y[..., WIDTH:] = m.b(x)
    y[:, 0] += 1.0
    y.mul_(2.0)
    return x + m.narrow(y.tanh_())


def started_cache(m: Own, x: Tensor, _: Tensor) -> Tensor:
    """Keys and values joined to an empty cache of one dim, as key caches start."""
    k, v = (torch.cat([torch.tensor([], dtype=x.dtype), heads_of(part(x))], dim=-2) for part in (m.b, m.c))
    return m.o((causal(heads_of(m.a(x)) @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2))


def picked_rows(m: Own, x: Tensor, _: Tensor) -> Tensor:
    y = F.gelu(m.wide(x))
    order = torch.arange(LENGTH - 1, -1, -1, device=x.device)
    y = y[:, order] + y.index_select(1, order) + y.flip(1) + y[:, [0, 2, 1, 3, 5, 4]]
    last = y[torch.arange(BATCH, device=x.device), -1]
    return x + m.narrow(y + last[:, None] + y.new_ones(2 * WIDTH) + y.gather(1, order[None, :, None].expand_as(y)))


def experts_by_mask(m: Own, x: Tensor, _: Tensor) -> Tensor:
    scores = m.a(x)[..., :2].softmax(-1)
    best, which = scores.topk(1, -1)
    experts = [m.narrow(F.relu(m.wide(x))), m.o(torch.relu(m.c(x)))]
    chosen = F.one_hot(which.squeeze(-1), 2).to(x.dtype)
    return x + sum(chosen[..., i, None] * best * expert for i, expert in enumerate(experts))


def log_softmax_and_nll(m: Own, x: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(m.head(m.o(x)), -1).flatten(0, 1), labels.flatten())


def class_dim_in_the_middle(m: Own, x: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(m.head(x).transpose(1, 2).log_softmax(1), labels, reduction="sum")


def gathered_log_probabilities(m: Own, x: Tensor, labels: Tensor) -> Tensor:
    logits = m.head(x + m.narrow(F.gelu(m.wide(x))))
    return -logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1).mean()


def logsumexp_loss(m: Own, x: Tensor, labels: Tensor) -> Tensor:
    logits = m.head(m.o(x))
    picked = torch.gather(logits, 2, labels[..., None])[..., 0]
    return (torch.logsumexp(logits, -1) - picked).mean()


def composites(m: Own, x: Tensor, _: Tensor) -> Tensor:
    y = torch.hstack([m.a(x), m.b(x)])[:, :LENGTH]
    similar = F.cosine_similarity(m.a(x), m.b(x), dim=-1)
    distance = F.pairwise_distance(m.a(x), m.c(x))
    return x + m.o(y) * (similar + distance)[..., None] + F.softmin(m.b(x), -1)


BODIES: dict[str, Callable[[Own, Tensor, Tensor], Tensor]] = {
    f.__name__: f
    for f in (
        five_dim_einsum,
        ellipsis_einsum,
        by_hand_norm,
        complex_rotary,
        rolled_rotary,
        relative_bias,
        alibi,
        chunks_and_gates,
        shared_keys_by_expand,
        repeated_keys,
        torch_attention,
        convolutions,
        bilinear_and_products,
        written_in_place,
        started_cache,
        picked_rows,
        experts_by_mask,
        log_softmax_and_nll,
        class_dim_in_the_middle,
        gathered_log_probabilities,
        logsumexp_loss,
        composites,
    )
}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(CLASSES, (BATCH, LENGTH), generator=generator) for name in ("ids", "labels")}
