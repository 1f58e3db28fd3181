"""Experts with a fixed number of slots for the tokens of a microbatch, in the spellings that people use.

What finds no slot is dropped; a slot that no token takes is computed all the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E = 4


class Slots(nn.Module):
    """Four experts of [hidden → width → hidden]; ``way`` is how tokens come to ``capacity`` slots of each."""

    def __init__(
        self, way: Way, capacity: int = 3, hidden: int = 8, width: int = 12, favoured: float = 0.0, least: float = 0.0
    ) -> None:
        """``favoured``: how much more one expert is liked. ``least``: weights below it count nothing."""
        super().__init__()
        self.way, self.capacity, self.least, self.length = way, capacity, least, 0
        self.gate = nn.Linear(hidden, E)
        with torch.no_grad():
            self.gate.bias[2] += favoured
        if way in BRANCHES:
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(hidden, width), nn.GELU(), nn.Linear(width, hidden)) for _ in range(E)
            )
        else:
            self.up = nn.Parameter(torch.randn(E, hidden, (2 if way is gated else 1) * width) * 0.3)
            self.down = nn.Parameter(torch.randn(E, width, hidden) * 0.3)
            self.bias = nn.Parameter(torch.randn(E, 1, width) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        self.length = x.shape[1]
        return self.way(self, x.flatten(0, 1), self.gate(x.flatten(0, 1)).softmax(-1)).view_as(x)


Way = Callable[[Slots, Tensor, Tensor], Tensor]


def places(chosen: Tensor) -> Tensor:
    """chosen [t, k] → the place of each choice in the queue of its expert: all first choices, then all second ones."""
    mask = F.one_hot(chosen.t().flatten(), E)
    return ((mask.cumsum(0) - 1) * mask).sum(-1).view(chosen.shape[1], -1).t()


def tensors(layer: Slots, probs: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """GShard: which token goes into which slot, and the same weighted, [t, e, c]."""
    weights, chosen = probs.topk(top_k, -1)
    place = places(chosen)
    kept = (place < layer.capacity).to(probs.dtype)
    slot = F.one_hot(place.clamp(max=layer.capacity - 1), layer.capacity).to(probs.dtype)
    mask = F.one_hot(chosen, E).to(probs.dtype) * kept.unsqueeze(-1)
    return torch.einsum("tke,tkc->tec", mask, slot), torch.einsum("tk,tke,tkc->tec", weights, mask, slot)


def one_hot(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """Two experts a token, all products by einsum."""
    dispatch, combine = tensors(layer, probs, 2)
    inner = F.gelu(torch.einsum("ecd,edh->ech", torch.einsum("tec,td->ecd", dispatch, x), layer.up))
    return torch.einsum("tec,ecd->td", combine, torch.einsum("ech,ehd->ecd", inner, layer.down))


def switch(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """One expert a token, products by bmm, and a bias of each expert: an empty slot is not zero inside."""
    weight, chosen = probs.max(-1)
    mask = F.one_hot(chosen, E)
    place = (mask.cumsum(0) * mask - 1).clamp(min=-1)
    slot = F.one_hot((place + 1).clamp(max=layer.capacity + 1), layer.capacity + 2)[..., 1:-1].to(x.dtype)
    inner = F.gelu(torch.bmm(torch.einsum("tec,td->ecd", slot, x), layer.up) + layer.bias)
    return torch.einsum("tec,ecd->td", slot * weight[:, None, None], torch.bmm(inner, layer.down))


def gated(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """Gate and up in one stack; slots and experts in one dim until they meet it."""
    dispatch, combine = tensors(layer, probs, 2)
    slots = dispatch.permute(1, 2, 0).flatten(0, 1) @ x
    gate, up = torch.bmm(slots.view(E, layer.capacity, -1), layer.up).chunk(2, -1)
    made = torch.bmm(F.silu(gate) * up, layer.down)
    return combine.flatten(1) @ made.reshape(E * layer.capacity, -1)


def scattered(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """Rows are added into a buffer of all slots, and one more for those that are dropped; and picked from it."""
    weights, chosen = probs.topk(2, -1)
    place = places(chosen)
    at = torch.where(place < layer.capacity, chosen * layer.capacity + place, E * layer.capacity).flatten()
    buffer = x.new_zeros(E * layer.capacity + 1, x.shape[-1]).index_add(0, at, x.repeat_interleave(2, 0))
    inner = F.gelu(torch.bmm(buffer[:-1].view(E, layer.capacity, -1), layer.up) + layer.bias)
    made = torch.bmm(inner, layer.down).flatten(0, 1)
    rows = torch.cat([made, made.new_zeros(1, made.shape[-1])])[at].view(*chosen.shape, -1)
    return (rows * weights.unsqueeze(-1)).sum(1)


def written(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """Rows are written into [e, c, d] by two indices; the weight of what is dropped is zero."""
    weights, chosen = probs.topk(2, -1)
    place = places(chosen)
    kept = place < layer.capacity
    if layer.least:
        kept = kept & (weights > layer.least)
    place = place.clamp(max=layer.capacity - 1)
    buffer = x.new_zeros(E, layer.capacity, x.shape[-1])
    rows = x.unsqueeze(1) * kept.unsqueeze(-1)
    buffer = buffer.index_put((chosen, place), rows, accumulate=True)
    made = torch.einsum("ech,ehd->ecd", F.gelu(torch.einsum("ecd,edh->ech", buffer, layer.up)), layer.down)
    return (made[chosen, place] * (weights * kept).unsqueeze(-1)).sum(1)


def expert_choice(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """Each expert takes its best tokens; a token may be taken by several, or by none."""
    weights, taken = probs.t().topk(min(layer.capacity, len(x)), -1)
    made = torch.bmm(F.gelu(torch.bmm(x[taken], layer.up)), layer.down) * weights.unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, taken.flatten(), made.flatten(0, 1))


def by_probability(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """Of the tokens that chose it, each expert keeps the likeliest."""
    weights, chosen = probs.topk(2, -1)
    gates = torch.zeros_like(probs).scatter(-1, chosen, weights)
    kept, taken = gates.t().topk(min(layer.capacity, len(x)), -1)
    made = torch.bmm(F.gelu(torch.bmm(x[taken], layer.up)), layer.down) * kept.unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, taken.flatten(), made.flatten(0, 1))


def by_sequence(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """Slots of each sequence, [b, e, c, d]: what a sequence gives does not depend on the others of its batch."""
    x, probs = (value.unflatten(0, (-1, layer.length)) for value in (x, probs))
    weights, chosen = probs.topk(2, -1)
    mask = F.one_hot(chosen, E)
    place = (mask.transpose(1, 2).flatten(1, 2).cumsum(1) - 1).unflatten(1, (2, -1)).transpose(1, 2)
    slot = F.one_hot(place.masked_fill(mask == 0, layer.capacity).clamp(max=layer.capacity), layer.capacity + 1)
    slot = slot[..., : layer.capacity].to(x.dtype)  # [b, s, k, e, c]
    inner = F.gelu(torch.einsum("becd,edh->bech", torch.einsum("bskec,bsd->becd", slot, x), layer.up) + layer.bias)
    made = torch.einsum("bech,ehd->becd", inner, layer.down)
    return torch.einsum("bskec,bsk,becd->bsd", slot, weights, made).flatten(0, 1)


def unbound(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """Experts are modules of their own, each on its slots; what they make is stacked."""
    dispatch, combine = tensors(layer, probs, 2)
    slots = torch.einsum("tec,td->ecd", dispatch, x)
    made = torch.stack([expert(own) for expert, own in zip(layer.experts, slots.unbind(0), strict=True)])
    return torch.einsum("tec,ecd->td", combine, made)


def chunks(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """The same, of chunks that keep the dim, put behind each other."""
    dispatch, combine = tensors(layer, probs, 1)
    slots = torch.einsum("tec,td->ecd", dispatch, x)
    made = torch.cat([expert(own) for expert, own in zip(layer.experts, slots.chunk(E, 0), strict=True)])
    return combine.flatten(1) @ made.flatten(0, 1)


def as_deepspeed(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """Slots of the ranks of a group of one: [1, e, c, d], chunks of which keep all dims."""
    dispatch, combine = tensors(layer, probs, 1)
    slots = torch.einsum("tec,td->ecd", dispatch, x).reshape(1, E, -1, x.shape[-1])
    made = torch.cat([e(own) for e, own in zip(layer.experts, slots.chunk(E, dim=1), strict=True)], dim=1)
    return torch.einsum("tec,ecd->td", combine, made.reshape(E, -1, x.shape[-1]))


def experts_first(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """Slots of each half of the tokens, [2, e, c, d], brought to [e, 2 · c, d] for one module each."""
    weights, chosen = probs.unflatten(0, (2, -1)).topk(2, -1)
    place = torch.stack([places(half) for half in chosen])
    slot = F.one_hot(place.clamp(max=layer.capacity), layer.capacity + 1)[..., : layer.capacity].to(x.dtype)
    mask = F.one_hot(chosen, E).to(x.dtype)
    dispatch = torch.einsum("gtke,gtkc->gtec", mask, slot)
    combine = torch.einsum("gtk,gtke,gtkc->gtec", weights, mask, slot)
    slots = torch.einsum("gtec,gtd->gecd", dispatch, x.unflatten(0, (2, -1)))
    own = slots.permute(1, 0, 2, 3).flatten(1, 2)
    made = torch.stack([layer.experts[e](own[e]) for e in range(E)])
    made = made.unflatten(1, (2, -1)).permute(1, 0, 2, 3)
    return torch.einsum("gtec,gecd->gtd", combine, made).flatten(0, 1)


# ---- what one process computes, and no rank may compute of the slots that it has alone


def centered(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """The mean over an expert's slots is taken off."""
    dispatch, combine = tensors(layer, probs, 2)
    inner = torch.bmm(torch.einsum("tec,td->ecd", dispatch, x), layer.up)
    made = torch.bmm(F.gelu(inner - inner.mean(1, keepdim=True)), layer.down)
    return torch.einsum("tec,ecd->td", combine, made)


def competing(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """Experts are normalised against each other, slot by slot."""
    dispatch, combine = tensors(layer, probs, 2)
    inner = torch.bmm(torch.einsum("tec,td->ecd", dispatch, x), layer.up).softmax(0)
    return torch.einsum("tec,ecd->td", combine, torch.bmm(inner, layer.down))


def shared(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """All experts scale what is inside by the first expert's bias, and by the router's."""
    dispatch, combine = tensors(layer, probs, 2)
    inner = torch.bmm(torch.einsum("tec,td->ecd", dispatch, x), layer.up)
    made = torch.bmm(F.gelu(inner * layer.gate.bias.sum()), layer.down)
    return torch.einsum("tec,ecd->td", combine, made)


def dropped_out(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """Dropout inside of the experts."""
    dispatch, combine = tensors(layer, probs, 2)
    inner = torch.bmm(torch.einsum("tec,td->ecd", dispatch, x), layer.up)
    return torch.einsum("tec,ecd->td", combine, torch.bmm(F.dropout(F.gelu(inner), 0.1), layer.down))


def apart(layer: Slots, x: Tensor, probs: Tensor) -> Tensor:
    """What each branch makes goes back to tokens by itself."""
    dispatch, combine = tensors(layer, probs, 2)
    slots = torch.einsum("tec,td->ecd", dispatch, x)
    return torch.stack([combine[:, e] @ expert(slots[e]) for e, expert in enumerate(layer.experts)]).sum(0)


BRANCHES: tuple[Way, ...] = (unbound, chunks, as_deepspeed, experts_first, apart)
CHOICES: dict[Way, int] = {switch: 1, chunks: 1, as_deepspeed: 1}  # of a token, where they are not two
REFUSED: dict[Way, str] = {
    centered: "one slot of one expert depends on others",
    competing: "one slot of one expert depends on others",
    shared: "which does not belong to one expert",
    dropped_out: "dropout inside experts draws for slots",
    apart: "apparent expert layer is not recognized",
}
WAYS: tuple[Way, ...] = (
    one_hot,
    switch,
    gated,
    scattered,
    written,
    expert_choice,
    by_probability,
    by_sequence,
    unbound,
    chunks,
    as_deepspeed,
    experts_first,
)
