"""Experts as stacks that every token meets, in the spellings that people use, and such that do not keep them apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.experts import Layer, stacked


class Stacks(Layer):
    """Experts with a gated activation and biases, each a stack; a shared linear. A way may leave some out."""

    up_bias: nn.Parameter
    down_bias: nn.Parameter
    shared: nn.Linear

    def __init__(self, way: StackedWay, hidden: int = 8, width: int = 12, num_experts: int = 4, top_k: int = 2) -> None:
        super().__init__(stacked, hidden, width, num_experts, top_k)
        self.stacked_way = way
        self.up = nn.Parameter(torch.randn(num_experts, hidden, 2 * width) * 0.3)
        self.up_bias = nn.Parameter(torch.randn(num_experts, 2 * width) * 0.3)
        self.down_bias = nn.Parameter(torch.randn(num_experts, hidden) * 0.3)
        self.shared = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        probs, chosen = self.gate(x).softmax(-1).topk(self.top_k, -1)
        return self.stacked_way(self, x, probs, chosen)


StackedWay = Callable[[Stacks, Tensor, Tensor, Tensor], Tensor]


def gates_of(layer: Stacks, probs: Tensor, chosen: Tensor) -> Tensor:
    """[.., E], zero but for the chosen."""
    return probs.new_zeros(*probs.shape[:-1], layer.num_experts).scatter(-1, chosen, probs)


def gated(inner: Tensor) -> Tensor:
    gate, up = inner.chunk(2, dim=-1)
    return F.silu(gate) * up


def scaled_before(layer: Stacks, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """As transformers writes Llama 4: the weight scales what the expert reads, experts and tokens in one dim."""
    flat = x.flatten(0, 1)
    scores = probs.new_full((len(flat), layer.num_experts), -torch.inf)
    gates = scores.scatter(1, chosen.flatten(0, 1), probs.flatten(0, 1)).sigmoid()
    copies = flat.repeat(layer.num_experts, 1) * gates.transpose(0, 1).reshape(-1, 1)
    made = torch.bmm(gated(torch.bmm(copies.view(layer.num_experts, -1, flat.shape[-1]), layer.up)), layer.down)
    out = layer.shared(flat)
    out.add_(made.view(-1, flat.shape[-1]).reshape(layer.num_experts, -1, flat.shape[-1]).sum(dim=0))
    return out.view_as(x)


def broadcast(layer: Stacks, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Products by matmul, in which a dim of size 1 meets the experts; the sum is a product too."""
    inner = gated(x[:, :, None, None] @ layer.up)
    made = (inner @ layer.down).squeeze(-2)
    return (gates_of(layer, probs, chosen).unsqueeze(-2) @ made).squeeze(-2)


def in_one_product(layer: Stacks, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """The second matrices, the gates and the sum over experts are one einsum of three operands."""
    inner = gated(torch.einsum("bsd,edh->ebsh", x, layer.up))
    return torch.einsum("ebsh,ehd,bse->bsd", inner, layer.down, gates_of(layer, probs, chosen))


def biased(layer: Stacks, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    inner = torch.einsum("bsd,edh->ebsh", x, layer.up) + layer.up_bias[:, None, None]
    made = torch.einsum("ebsh,ehd->ebsd", gated(inner), layer.down) + layer.down_bias[:, None, None]
    return (made * gates_of(layer, probs, chosen).permute(2, 0, 1).unsqueeze(-1)).sum(0)


def masked(layer: Stacks, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """All experts weighted by their probability; what is not chosen is masked out at the end."""
    every = layer.gate(x).softmax(-1)
    mask = F.one_hot(chosen, layer.num_experts).sum(-2).bool()
    inner = torch.einsum("bsd,edh->bseh", x, layer.up) + layer.up_bias
    made = torch.einsum("bseh,ehd->bsed", gated(inner), layer.down) + layer.down_bias
    return torch.where(mask.unsqueeze(-1), made * every.unsqueeze(-1), 0).sum(-2)


def picked_of_all(layer: Stacks, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Computed for all experts, of which the chosen are picked."""
    made = torch.einsum("bseh,ehd->bsed", gated(torch.einsum("bsd,edh->bseh", x, layer.up) + layer.up_bias), layer.down)
    mine = made.gather(2, chosen.unsqueeze(-1).expand(*chosen.shape, x.shape[-1]))
    return (mine * probs.unsqueeze(-1)).sum(2) + layer.shared(x)


def of_pairs(layer: Stacks, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """As transformers' batched products: a row for each pair, its expert's matrices and biases looked up."""
    ids, flat = chosen.reshape(-1), x.flatten(0, 1)
    token = torch.arange(len(flat), device=x.device).unsqueeze(1).expand(-1, layer.top_k).reshape(-1)
    inner = torch.bmm(flat[token].unsqueeze(1), layer.up[ids]).squeeze(1) + layer.up_bias[ids]
    made = torch.bmm(layer.down[ids].transpose(1, 2), gated(inner).unsqueeze(-1)).squeeze(-1) + layer.down_bias[ids]
    return (made * probs.reshape(-1, 1)).view(len(flat), layer.top_k, -1).sum(1).view_as(x)


def first_alone(layer: Stacks, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Chosen are k, used is one."""
    gates = F.one_hot(chosen[..., 0], layer.num_experts).to(x.dtype) * probs[..., :1]
    inner = gated(torch.einsum("bsd,edh->bseh", x, layer.up))
    return torch.einsum("bsed,bse->bsd", torch.einsum("bseh,ehd->bsed", inner, layer.down), gates)


WAYS: tuple[StackedWay, ...] = (
    scaled_before,
    broadcast,
    in_one_product,
    biased,
    masked,
    picked_of_all,
    of_pairs,
    first_alone,
)


# ---- experts that give something to tokens that did not choose them, or that mix tokens


def straight_through(layer: Stacks, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Zero for what is not chosen, with the gradient of all probabilities."""
    every, hard = layer.gate(x).softmax(-1), gates_of(layer, probs, chosen)
    gates = hard.detach() + every - every.detach()
    inner = gated(torch.einsum("bsd,edh->bseh", x, layer.up))
    return torch.einsum("bsed,bse->bsd", torch.einsum("bseh,ehd->bsed", inner, layer.down), gates)


def a_little_of_all(layer: Stacks, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    inner = gated(torch.einsum("bsd,edh->bseh", x, layer.up))
    gates = gates_of(layer, probs, chosen) + 0.01
    return torch.einsum("bsed,bse->bsd", torch.einsum("bseh,ehd->bsed", inner, layer.down), gates)


def biased_after_gates(layer: Stacks, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """An expert that gets nothing gives its bias."""
    copies = x.unsqueeze(2) * gates_of(layer, probs, chosen).unsqueeze(-1)
    inner = gated(torch.einsum("bsed,edh->bseh", copies, layer.up))
    return (torch.einsum("bseh,ehd->bsed", inner, layer.down) + layer.down_bias).sum(2)


def mixing_tokens(layer: Stacks, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    inner = gated(torch.einsum("bsd,edh->bseh", x, layer.up)).cumsum(1)
    return torch.einsum(
        "bsed,bse->bsd", torch.einsum("bseh,ehd->bsed", inner, layer.down), gates_of(layer, probs, chosen)
    )


def over_experts(layer: Stacks, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """A softmax over what the experts make of one token."""
    inner = gated(torch.einsum("bsd,edh->bseh", x, layer.up)).softmax(2)
    return torch.einsum(
        "bsed,bse->bsd", torch.einsum("bseh,ehd->bsed", inner, layer.down), gates_of(layer, probs, chosen)
    )


def dropped_inside(layer: Stacks, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    inner = F.dropout(gated(torch.einsum("bsd,edh->bseh", x, layer.up)), 0.5)
    return torch.einsum(
        "bsed,bse->bsd", torch.einsum("bseh,ehd->bsed", inner, layer.down), gates_of(layer, probs, chosen)
    )


REFUSED: dict[StackedWay, str] = {
    straight_through: "a token may get a result from an expert that it did not choose",
    a_little_of_all: "a token may get a result from an expert that it did not choose",
    biased_after_gates: "a token may get a result from an expert that it did not choose",
    mixing_tokens: "the result of one token of one expert depends on others",
    over_experts: "the result of one token of one expert depends on others",
    dropped_inside: "dropout inside experts draws for rows that other ranks hold",
}
