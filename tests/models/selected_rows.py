"""Experts in a loop over the rows that chose them, in the spellings that people use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.experts import Layer, Way

NUM_EXPERTS = 4


def index_add(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        token, choice = torch.where(chosen == e)
        out.index_add_(0, token, expert(x[token]) * probs[token, choice, None])
    return out


def one_hot(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """As transformers wrote Mixtral."""
    out = torch.zeros_like(x)
    mask = F.one_hot(chosen, num_classes=NUM_EXPERTS).permute(2, 1, 0)
    for e in range(NUM_EXPERTS):
        choice, token = torch.where(mask[e])
        rows = x[None, token].reshape(-1, x.shape[-1])
        rows = layer.experts[e](rows) * probs[token, choice, None]
        out.index_add_(0, token, rows.to(x.dtype))
    return out


def compared_with_all(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """As litgpt writes it: the masks of all experts at once."""
    every = (chosen.unsqueeze(-1) == torch.arange(NUM_EXPERTS)).permute(2, 0, 1)
    out = torch.zeros_like(x)
    for mask, expert in zip(every, layer.experts, strict=True):
        token, choice = torch.where(mask)
        out[token] += probs[token, choice, None] * expert(x[token])
    return out


def one_hot_in_place(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """One-hot choices as they come, experts asked for by their number of tokens."""
    mask, out = F.one_hot(chosen, NUM_EXPERTS), torch.zeros_like(x)
    for e in range(NUM_EXPERTS):
        if mask[..., e].sum() > 0:
            token, choice = torch.where(mask[..., e] > 0)
            out[token] += layer.experts[e](x[token]) * probs[token, choice][:, None]
    return out


def counts_in_a_list(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """The number of rows of each expert is asked for on the host, by bincount."""
    out = torch.zeros_like(x)
    for e, count in enumerate(torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS).tolist()):
        if count == 0:
            continue
        token, choice = torch.where(chosen == e)
        out.index_add_(0, token, layer.experts[e](x[token]) * probs[token, choice, None])
    return out


def counts_of_masks_in_a_list(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out, masks = torch.zeros_like(x), [(chosen == e).any(-1) for e in range(NUM_EXPERTS)]
    for e, count in enumerate(torch.stack([mask.sum() for mask in masks]).tolist()):
        if count > 0:
            weight = torch.where(chosen == e, probs, 0).sum(-1, keepdim=True)
            out[masks[e]] += layer.experts[e](x[masks[e]]) * weight[masks[e]]
    return out


def columns_of_nonzero(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        at = (chosen == e).nonzero()
        token, choice = at[:, 0], at[:, 1]
        y = expert(torch.index_select(x, 0, token))
        out = torch.index_add(out, 0, token, y.mul_(probs[token, choice].unsqueeze(-1)))
    return out


def unbound_nonzero(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        token, choice = torch.nonzero(chosen == e).unbind(-1)
        out[token] += probs[token, choice].view(-1, 1) * expert(x[token])
    return out


def some_choice(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Tokens by any of their choices; their weight is looked up apart."""
    gates = torch.zeros(len(x), NUM_EXPERTS, dtype=x.dtype).scatter(1, chosen, probs)
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        at = (chosen == e).any(-1).nonzero().squeeze(-1)
        if at.numel() == 0:
            continue
        out[at] = out[at] + expert(x[at]) * gates[at, e].unsqueeze(-1)
    return out


def masks(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    gates = torch.zeros(len(x), NUM_EXPERTS, dtype=x.dtype).scatter(1, chosen, probs)
    out = torch.zeros_like(x)
    for e in range(NUM_EXPERTS):
        mask = (chosen == e).any(dim=-1)
        if mask.any():
            out[mask] += gates[mask, e, None] * layer.experts[e](x[mask])
    return out


def columns(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """A loop over choices outside, over experts inside."""
    out = torch.zeros_like(x)
    for k in range(chosen.shape[1]):
        for e, expert in enumerate(layer.experts):
            mask = chosen[:, k] == e
            if not mask.any():
                continue
            out[mask] = out[mask] + probs[mask, k : k + 1] * expert(x[mask])
    return out


def scattered(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        token, choice = (chosen == e).nonzero(as_tuple=True)
        if token.shape[0] > 0:
            at = token.unsqueeze(-1).expand(-1, x.shape[-1])
            out = out.scatter_add(0, at, expert(x.gather(0, at)) * probs[token, choice].unsqueeze(-1))
    return out


def accumulated(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out = x.new_zeros(x.shape)
    for e, expert in enumerate(layer.experts):
        mask = chosen == e
        if mask.sum() == 0:
            continue
        token, _ = mask.nonzero(as_tuple=True)
        y = expert(x[token]) * probs[mask].unsqueeze(-1)
        out.index_put_((token,), y, accumulate=True)
    return out


def every_copy(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """As DeepSeek trains: a copy of each token for each choice, overwritten."""
    copies, flat = x.repeat_interleave(chosen.shape[1], dim=0), chosen.view(-1)
    y = torch.empty_like(copies)
    for e, expert in enumerate(layer.experts):
        y[flat == e] = expert(copies[flat == e])
    return (y.view(*probs.shape, -1) * probs.unsqueeze(-1)).sum(dim=1)


def weighted_before(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """The weight scales what the expert reads."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        token, choice = torch.where(chosen == e)
        out.index_add_(0, token, expert(x[token] * probs[token, choice, None]))
    return out


def counted(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Asks by the number of rows, puts rows into a buffer of that size."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        token, choice = torch.where(chosen == e)
        if token.shape[0] == 0:
            continue
        y = torch.zeros(token.shape[0], x.shape[-1], dtype=x.dtype) + expert(x[token])
        out.index_add_(0, token, y * probs[token, choice].reshape(token.shape[0], 1))
    return out


def divided(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """A norm without an epsilon and a logarithm, which rows of zeros make inf and NaN."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        token, choice = torch.where(chosen == e)
        y = x[token] / x[token].pow(2).sum(-1, keepdim=True).sqrt()
        out.index_add_(0, token, expert(y) * (probs[token, choice, None].log() + 2))
    return out


def of_batches(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Tokens of [b, s], chosen by the first choice alone."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        mask = chosen[..., 0] == e
        out[mask] = expert(x[mask]) * probs[..., :1][mask]
    return out


def pairs_of_batches(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Positions in [b, s, k]."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        row, column, choice = torch.where(chosen == e)
        y = expert(x[row, column]) * probs[row, column, choice, None]
        out.index_put_((row, column), y, accumulate=True)
    return out


def beside_shared(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """The sum begins with what a shared expert makes."""
    out = F.gelu(x) * 0.5
    for e, expert in enumerate(layer.experts):
        token, choice = torch.where(chosen == e)
        out = out.index_add(0, token, expert(x[token]) * probs[token, choice, None])
    return out


def weighted_by_another(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """The scores choose alone; the weight of an expert is a column of another value."""
    out, weights = torch.zeros_like(x), torch.tanh(x + probs.sum(-1, keepdim=True))
    for e, expert in enumerate(layer.experts):
        token, _ = torch.where(chosen == e)
        out = out.index_add(0, token, expert(x[token]) * weights[token, e, None])
    return out


def overwritten(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """The last of a token's experts is what remains: not a sum."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        mask = (chosen == e).any(-1)
        out[mask] = expert(x[mask])
    return out


FLAT: tuple[Way, ...] = (
    index_add,
    one_hot,
    compared_with_all,
    one_hot_in_place,
    columns_of_nonzero,
    unbound_nonzero,
    some_choice,
    masks,
    columns,
    scattered,
    accumulated,
    every_copy,
    weighted_before,
    counted,
    divided,
    beside_shared,
    weighted_by_another,
)
ON_THE_HOST: tuple[Way, ...] = (counts_in_a_list, counts_of_masks_in_a_list)
OF_BATCHES: tuple[Way, ...] = (of_batches, pairs_of_batches)
WAYS = (*FLAT, *ON_THE_HOST, *OF_BATCHES)


class Selecting(Layer):
    """A layer of experts whose loop selects rows; ``FLAT`` ways see tokens of all sequences in one dim."""

    def __init__(self, way: Way, **sizes: int) -> None:
        super().__init__(way, **sizes)
        self.experts = nn.ModuleList(SwiGLU(**sizes) for _ in range(self.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        if self.way in OF_BATCHES:
            return super().forward(x)
        return super().forward(x.view(-1, x.shape[-1])).view(x.shape)


class SwiGLU(nn.Module):
    def __init__(self, hidden: int = 8, width: int = 12, **others: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(hidden, width), nn.Linear(hidden, width), nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
