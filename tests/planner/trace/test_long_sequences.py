"""At 32,768 tokens over cp, no call of a rank makes a matrix of its rows and all keys, by tensors without values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import plan
from planner.trace.lowered import Lowered

LENGTH, CP, VOCABULARY, WIDTH, HEADS = 1 << 15, 8, 61, 16, 2


class Latent(nn.Module):
    """Values narrower than keys, as in multi-head latent attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, HEADS * 12), nn.Linear(WIDTH, HEADS * 12)
        self.v, self.out = nn.Linear(WIDTH, HEADS * 8), nn.Linear(HEADS * 8, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Latent() for _ in range(2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.tokens(tokens), None, targets)

    def loss(self, x: Tensor, mask: Tensor | None, targets: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def largest_bytes(kind: type[nn.Module], names: tuple[str, ...], **more: Any) -> dict[str, int]:
    """The most bytes that a call of a rank holds at once, or that one of its results has, by its name."""
    with torch.device("meta"):
        model = kind()
    inputs = {name: {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY} for name in names}
    decided = plan(model, {"mesh": {"cp": CP}, "batch": {"global": 1, "micro": 1}, "inputs": inputs} | more)
    trace = Lowered(*decided.to_run()).trace(0)
    assert not trace.unseen
    held = {call.name: max(call.seen.peak, call.seen.backward_peak) for call in trace.calls}
    for call in trace.calls:
        held[call.name] = max([held[call.name], *(trace.bytes_of[m] for m in (*call.makes, *call.reads))])
    return {name: size for name, size in held.items() if size >= LENGTH * LENGTH // CP}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("more", [{}, {"attention": "cudnn"}], ids=["flash", "cudnn"])
def test_values_narrower_than_keys_need_no_mask(more: dict[str, Any]) -> None:
    assert largest_bytes(Decoder, ("tokens", "targets"), **more) == {}
