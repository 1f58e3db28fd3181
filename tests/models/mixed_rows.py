"""Experts in loops in which a row depends on which others are selected; a comment marks the line that must be named."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.models.experts import Layer, Way
from tests.models.selected_rows import NUM_EXPERTS


def mean_of_rows(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        token, _ = torch.where(chosen == e)
        y = expert(x[token])
        out.index_add_(0, token, y - y.mean(0))
    return out


def sums_of_rows(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        token, _ = torch.where(chosen == e)
        out.index_add_(0, token, expert(x[token]).cumsum(0))  # here
    return out


def divided_by_count(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        token, _ = torch.where(chosen == e)
        out.index_add_(0, token, expert(x[token]) / token.numel())  # here
    return out


def attention_of_rows(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        mask = (chosen == e).any(-1)
        y = expert(x[mask])
        out[mask] += (y @ y.t()).softmax(-1) @ y  # here
    return out


def positions_as_numbers(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        token, choice = torch.where(chosen == e)
        out.index_add_(0, token, expert(x[token]) * (choice + 1).unsqueeze(-1))  # here
    return out


def other_rows(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        token, _ = torch.where(chosen == e)
        out.index_add_(0, token.flip(0), expert(x[token]))  # here
    return out


def first_rows(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """A capacity: what comes later is dropped."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        token = torch.where(chosen == e)[0][:3]  # here
        out.index_add_(0, token, expert(x[token]))
    return out


def some_to_one_place(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Choices that are not those of a topk may name an expert twice."""
    out = torch.zeros_like(x)
    named = chosen % NUM_EXPERTS
    for e, expert in enumerate(layer.experts):
        token, _ = torch.where(named == e)
        out[token] = out[token] + expert(x[token])  # here
    return out


def more_than_few(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        token, _ = torch.where(chosen == e)
        if token.numel() > 2:  # here
            out.index_add_(0, token, expert(x[token]))
    return out


def split_by_counts(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    order = chosen.flatten().argsort()
    sizes = chosen.flatten().bincount(minlength=layer.num_experts).tolist()
    parts = x[order // layer.top_k].split(sizes)  # here
    made = torch.cat([expert(part) for expert, part in zip(layer.experts, parts, strict=True)])
    return torch.zeros_like(x).index_add(0, order // layer.top_k, made * probs.flatten()[order, None])


def something_else(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        mask = (chosen == e).any(-1)
        if mask.any():  # here
            out[mask] += expert(x[mask])
        else:
            out = out + x
    return out


def unused_counted(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out, unused = torch.zeros_like(x), 0
    for e, expert in enumerate(layer.experts):
        mask = (chosen == e).any(-1)
        if not mask.any():  # here
            unused += 1
            continue
        out[mask] += expert(x[mask])
    return out * (1 + unused)


def others_asked(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """The question is about another mask than the one that selects."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        mask = (chosen == e).any(-1)
        if (chosen[:, 0] == e).any():  # here
            out[mask] += expert(x[mask])
    return out


MIXING: tuple[Way, ...] = (
    sums_of_rows,
    divided_by_count,
    attention_of_rows,
    positions_as_numbers,
    other_rows,
    first_rows,
    some_to_one_place,
    split_by_counts,
)
ASKING: tuple[Way, ...] = (more_than_few, something_else, unused_counted, others_asked)
