"""Layers of experts that are drawn: a router, the function of one expert, a spelling of the whole, and their sizes.

Every draw is a layer that a user might write: the sum over a token's choices of weight times expert, of those choices
that find a slot where experts have slots. A seed gives the same layers on any machine. No token chooses all experts:
such a layer may be refused, as sizes do not say then whether a dim counts experts or choices.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import experts, selected_rows
from tests.models.sorted_experts import grouped

HIDDEN = 8
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (F.gelu, F.silu, torch.tanh, F.softplus)


class Drawn(nn.Module):
    """One layer. ``kind`` names how rows and experts are combined; other attributes are further draws."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.num_experts, self.width = draw.choice([2, 4, 6, 8]), draw.choice([4, 6, 12])
        self.top_k = draw.randint(1, min(3, self.num_experts - 1))
        self.act, self.score = draw.choice(ACTIVATIONS), draw.choice(SCORES)
        self.is_gated, self.has_bias, self.is_normed = (draw.random() < 0.4 for _ in range(3))
        self.gate = nn.Linear(HIDDEN, self.num_experts)
        self.register_buffer("shift", torch.randn(self.num_experts))
        (self.kind,) = draw.choices([*KINDS], [4, 5, 1, 1])
        ways, build = KINDS[self.kind]
        self.way, self.order, self.flag = draw.choice(ways), draw.choice(["etc", "tec"]), draw.random() < 0.5
        build(self)

    def forward(self, x: Tensor) -> Tensor:
        by_sequence = self.way in (*experts.LOOPS, *selected_rows.OF_BATCHES)
        tokens = x if by_sequence else x.flatten(0, 1)
        return self.way(self, tokens, *self.score(self, self.gate(tokens))).view_as(x)


Way = Callable[[Drawn, Tensor, Tensor, Tensor], Tensor]


def activated(of: Drawn | Expert, made: Tensor) -> Tensor:
    """The input of an expert's last matrix, from the output of its first."""
    if of.is_gated:
        gate, up = made.chunk(2, -1)
        made = of.act(gate) * up
    else:
        made = of.act(made)
    return F.layer_norm(made, made.shape[-1:]) if of.is_normed else made


# ---- routers: scores [.., E] → weights and experts of each token, [.., k]


def softmax_first(layer: Drawn, scores: Tensor) -> tuple[Tensor, Tensor]:
    probs, chosen = scores.softmax(-1).topk(layer.top_k, -1)
    return probs, chosen


def softmax_last(layer: Drawn, scores: Tensor) -> tuple[Tensor, Tensor]:
    best, chosen = scores.topk(layer.top_k, -1)
    return best.softmax(-1), chosen


def sigmoid_normed(layer: Drawn, scores: Tensor) -> tuple[Tensor, Tensor]:
    probs, chosen = scores.sigmoid().topk(layer.top_k, -1)
    return probs / probs.sum(-1, keepdim=True), chosen


def shifted(layer: Drawn, scores: Tensor) -> tuple[Tensor, Tensor]:
    """As DeepSeek-V3: a bias of the choices, which weighs nothing."""
    probs = scores.sigmoid()
    chosen = (probs + layer.shift).topk(layer.top_k, -1)[1]
    return probs.gather(-1, chosen), chosen


SCORES = (softmax_first, softmax_last, sigmoid_normed, shifted)


# ---- loops over modules


class Expert(nn.Module):
    def __init__(self, layer: Drawn) -> None:
        super().__init__()
        made = layer.width * (2 if layer.is_gated else 1)
        self.up = nn.Linear(HIDDEN, made, bias=layer.has_bias)
        self.down = nn.Linear(layer.width, HIDDEN, bias=layer.has_bias)
        self.norm = nn.LayerNorm(HIDDEN) if layer.flag else nn.Identity()
        self.act, self.is_gated, self.is_normed = layer.act, layer.is_gated, layer.is_normed

    def forward(self, x: Tensor) -> Tensor:
        return self.down(activated(self, self.up(self.norm(x))))


def build_loop(layer: Drawn) -> None:
    layer.experts = nn.ModuleList(Expert(layer) for _ in range(layer.num_experts))


LOOPS: tuple[Way, ...] = (
    *experts.LOOPS,
    selected_rows.index_add,
    selected_rows.columns_of_nonzero,
    selected_rows.columns,
    selected_rows.scattered,
    selected_rows.accumulated,
    selected_rows.every_copy,
    selected_rows.weighted_before,
    selected_rows.pairs_of_batches,
    selected_rows.beside_shared,
)


# ---- stacks


def build_stacks(layer: Drawn) -> None:
    made, size = layer.width * (2 if layer.is_gated else 1), layer.num_experts
    layer.up = nn.Parameter(torch.randn(size, HIDDEN, made) * 0.3)
    layer.down = nn.Parameter(torch.randn(size, layer.width, HIDDEN) * 0.3)
    layer.up_bias = nn.Parameter(torch.randn(size, made) * 0.3) if layer.has_bias else None


def gates(layer: Drawn, probs: Tensor, chosen: Tensor) -> Tensor:
    """[t, E], zero but for the chosen."""
    if layer.flag:
        return probs.new_zeros(len(probs), layer.num_experts).scatter(-1, chosen, probs)
    return (F.one_hot(chosen, layer.num_experts).to(probs.dtype) * probs.unsqueeze(-1)).sum(-2)


def of_all(layer: Drawn, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Every token with every expert, weighted by gates."""
    order = layer.order
    inner = torch.einsum(f"td,edc->{order}", x, layer.up)
    if layer.up_bias is not None:
        inner = inner + (layer.up_bias[:, None] if order == "etc" else layer.up_bias)
    made = torch.einsum(f"{order},ecd->{order.replace('c', 'd')}", activated(layer, inner), layer.down)
    weights = gates(layer, probs, chosen)
    weights = weights.t() if order == "etc" else weights
    return (made * weights.unsqueeze(-1)).sum(order.index("e"))


def copied(layer: Drawn, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """A copy of all tokens for each expert, products by bmm."""
    inner = torch.bmm(x.expand(layer.num_experts, *x.shape), layer.up)
    inner = inner if layer.up_bias is None else inner + layer.up_bias.unsqueeze(1)
    return torch.einsum("etd,te->td", torch.bmm(activated(layer, inner), layer.down), gates(layer, probs, chosen))


def looked_up(layer: Drawn, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """The matrices of its experts for each token."""
    inner = torch.einsum("td,tkdc->tkc", x, layer.up[chosen])
    inner = inner if layer.up_bias is None else inner + layer.up_bias[chosen]
    return (torch.einsum("tkc,tkcd->tkd", activated(layer, inner), layer.down[chosen]) * probs.unsqueeze(-1)).sum(-2)


def by_expert(layer: Drawn, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Rows sorted by expert, grouped products; results in the order of the pairs, or added to their tokens."""
    ids, order = chosen.flatten().sort(stable=True)
    ends = torch.bincount(chosen.flatten(), minlength=layer.num_experts).cumsum(0).int()
    inner = grouped(x[order // layer.top_k], layer.up, ends)
    inner = inner if layer.up_bias is None else inner + layer.up_bias[ids]
    made = grouped(activated(layer, inner), layer.down, ends)
    if layer.flag:
        made = made * probs.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // layer.top_k, made)
    return (made[order.argsort()].view(*chosen.shape, -1) * probs.unsqueeze(-1)).sum(1)


def sliced(layer: Drawn, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """A loop over parts of stacks."""
    y = torch.zeros_like(x)
    for number in range(layer.num_experts):
        inner = x @ layer.up[number]
        inner = inner if layer.up_bias is None else inner + layer.up_bias[number]
        y = y + activated(layer, inner) @ layer.down[number] * (probs * (chosen == number)).sum(-1, keepdim=True)
    return y


STACKS: tuple[Way, ...] = (of_all, copied, looked_up, by_expert, sliced)


# ---- slots, as many as tokens in all, or fewer


def of_slots(layer: Drawn, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """GShard: ``capacity`` slots of each expert, of stacks or of modules."""
    capacity = 3 if layer.flag else len(x)
    mask = F.one_hot(chosen, layer.num_experts)  # [t, k, e]
    queue = mask.transpose(0, 1).flatten(0, 1).cumsum(0) - 1
    place = (queue.view(layer.top_k, -1, layer.num_experts).transpose(0, 1) * mask).sum(-1)
    kept = (place < capacity).to(x.dtype)
    slot = F.one_hot(place.clamp(max=capacity - 1), capacity).to(x.dtype) * kept.unsqueeze(-1)
    dispatch = torch.einsum("tke,tkc->tec", mask.to(x.dtype), slot)
    combine = torch.einsum("tk,tke,tkc->tec", probs, mask.to(x.dtype), slot)
    sent = torch.einsum("tec,td->ecd", dispatch, x)
    if layer.kind == "slots of modules":
        made = torch.stack([expert(own) for expert, own in zip(layer.experts, sent.unbind(0), strict=True)])
    else:
        inner = torch.bmm(sent, layer.up)
        inner = inner if layer.up_bias is None else inner + layer.up_bias.unsqueeze(1)
        made = torch.bmm(activated(layer, inner), layer.down)
    return torch.einsum("tec,ecd->td", combine, made)


KINDS: dict[str, tuple[tuple[Way, ...], Callable[[Drawn], None]]] = {
    "loop": (LOOPS, build_loop),
    "stacks": (STACKS, build_stacks),
    "slots of stacks": ((of_slots,), build_stacks),
    "slots of modules": ((of_slots,), build_loop),
}


class DrawnNet(nn.Module):
    """Tokens, ``num_layers`` layers with a norm and a residual each, a head, a mean over tokens."""

    def __init__(self, seed: int, num_layers: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(experts.VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Drawn(seed * num_layers + n) for n in range(num_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(num_layers))
        self.head = nn.Linear(HIDDEN, experts.VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
