"""Rows (token, choice) sorted by expert, and back at their tokens, as a model's own routing sorts them.

route      chosen[t, k] → order[t·k], counts[E]      the pairs, sorted by expert
permute    x[t, h] → rows[t·k, h]                    the token of each pair
unpermute  rows[t·k, h], probs[t, k] → [t, h]        the sum over a token's choices, weighted
"""

import torch
from torch import Tensor


def route(chosen: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The order that sorts pairs by expert, tokens in their order within one; and how many each expert has (int64)."""
    flat = chosen.reshape(-1)
    return torch.sort(flat, stable=True).indices, torch.bincount(flat, minlength=num_experts)


def permute(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """One row for each pair, by expert."""
    return x.index_select(0, order // top_k)


def unpermute(rows: Tensor, order: Tensor, probs: Tensor) -> Tensor:
    """``rows`` back at their tokens: Σ over choices of prob · row, in the type of ``rows``."""
    by_token = rows.index_select(0, order.argsort()).view(*probs.shape, -1)
    return (by_token * probs.unsqueeze(-1).to(rows.dtype)).sum(1)
